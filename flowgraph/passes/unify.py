"""unify: a dim that only a hop knows takes the value that its inputs give it, over the whole graph.

A hop may call a dim as it likes: `x: Float32[Array, "n"]` read from `f32[token]` makes n the token dim of this hop, and
an output of shape `n` is one of shape `token`. Names that the graph sizes, and those that the ring counts, mean the
same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import msgspec

from flowgraph.errors import Diagnostic, Note
from flowgraph.ir.graph import Binding, Graph, Node, collects, repeats
from flowgraph.passes.sizes import COUNTED
from flowgraph.spec.dims import Expr, integer, parse, symbol
from flowgraph.spec.ports import Port


class Bound(NamedTuple):
    """What a dim is, and the input that says so."""

    value: Expr
    by: Binding


def unify(graph: Graph) -> list[Diagnostic]:
    """Bind every hop's own dims, writers first, and write what they are into its ports. Returns FG207 findings."""
    known = {*graph.dims, *COUNTED, "group", "sample"}
    found: list[Diagnostic] = []
    for node in _writers_first(graph):
        for binding in node.bindings:
            if binding.source is not None and (
                own := graph.nodes[binding.producer].column(binding.source.name)
            ):
                binding.source = own
        bound: dict[str, Bound] = {}
        for binding in node.bindings:
            for name, value in _said(graph, node, binding, known):
                first = bound.setdefault(name, Bound(value, binding))
                if first.value != value:
                    found.append(_differ(graph, node, name, first, Bound(value, binding)))
        changed = {name: b.value for name, b in bound.items() if b.value != symbol(name)}
        if changed:
            _rename(node, changed)
    return found


def _writers_first(graph: Graph) -> list[Node]:
    order: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(graph.nodes, ()))
    for node, binding in graph.columns():
        if binding.producer != node.name:
            order.add(node.name, binding.producer)
    try:
        return [graph.nodes[name] for name in order.static_order()]
    except CycleError:  # which has a finding of its own
        return []


def _said(graph: Graph, node: Node, binding: Binding, known: set[str]) -> Iterator[tuple[str, Expr]]:
    """(dim of the hop's own, what one input makes of it)."""
    source, port = binding.source, binding.port
    if source is None or not binding.is_column:
        return
    writer = graph.nodes[binding.producer]
    shape = source.shape
    if collects(writer, node) and not shape:
        shape = (symbol("trajectory"),)
    if repeats(source, writer, port, node) or len(shape) != len(port.shape):
        return
    for have, want in zip(shape, port.shape, strict=True):
        # n, or n+1 as bounds of ranges have it
        own = [(m, c) for m, c in want.terms if m]
        if len(own) == 1 and own[0][1] == 1 and len(own[0][0]) == 1 and own[0][0][0] not in known:
            rest = dict(want.terms).get((), 0)
            yield own[0][0][0], have + integer(-rest)


def _differ(graph: Graph, node: Node, name: str, first: Bound, second: Bound) -> Diagnostic:
    message = (
        f"dim {name!r} of {node.name} is {second.value} by its input {second.by.port.name}, "
        f"and {first.value} by {first.by.port.name}"
    )
    notes = (
        Note(first.by.decl.place, f"{first.by.port.name}: {first.by.port} gets {first.by.source} here"),
        Note(node.spec.place, f"{node.spec.use} takes both with the dim {name}"),
    )
    help = f"feed {second.by.port.name} what has the dim {first.value}, or give it a dim of its own"
    return Diagnostic("FG207", second.by.decl.place, message, help, notes)


def _rename(node: Node, bound: Mapping[str, Expr]) -> None:
    spec = node.spec
    maps = spec.facts.maps
    facts = msgspec.structs.replace(spec.facts, maps=str(bound[maps]) if maps and maps in bound else maps)
    inputs = {p.name: _port(p, bound) for p in spec.inputs}
    node.spec = msgspec.structs.replace(
        spec, facts=facts, inputs=tuple(inputs.values()), outputs=tuple(_port(p, bound) for p in spec.outputs)
    )
    for binding in node.bindings:
        binding.port = inputs[binding.port.name]


def _port(port: Port, bound: Mapping[str, Expr]) -> Port:
    return msgspec.structs.replace(
        port,
        shape=tuple(dim.substitute(bound) for dim in port.shape),
        facts=tuple(_fact(fact, bound) for fact in port.facts),
        columns=tuple(_port(column, bound) for column in port.columns),
    )


def _fact(fact: Any, bound: Mapping[str, Expr]) -> Any:
    """A promise with the same dims under their other names."""
    changed = {
        field: str(parse(text).substitute(bound))
        for field in ("dim", "bound")
        if (text := getattr(fact, field, ""))
    }
    return msgspec.structs.replace(fact, **changed) if changed else fact
