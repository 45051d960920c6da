"""A graph as text, as the passes see it: hops, whose they are, their typed ports, and what becomes of each column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.spec.forms import Bits, PerRow, Prefix, Wire
from flowgraph.spec.ports import Port


def graph_text(graph: Graph, rates: Mapping[str, object]) -> str:
    """The whole graph; equal graphs give equal texts. rates: hop → what it works on in a step."""
    dims = ", ".join(
        f"{n} {s.mean:g}" + (f" ≤ {s.max}" if s.mean != s.max else "") for n, s in graph.dims.items()
    )
    lines = [f"graph {graph.file.name}", f"dims {dims}"]
    for node in graph.nodes.values():
        lines += ["", *_hop(node, rates.get(node.name))]
    return "\n".join(lines) + "\n"


def _hop(node: Node, rate: object | None) -> Iterator[str]:
    rows = f"on {node.kind} rows, {rate}" if node.kind else "on events"
    owner = f"@{node.owner}" + (" (free)" if node.free else "")
    yield f"{node.spec.facts.kind} {node.name} = {node.spec.use} {owner} {rows}"
    if node.group:
        yield "  fires first of its group" if node.group == node.name else f"  fires with {node.group}"
    for binding in node.bindings:
        yield f"  {binding.port.mode} {binding.port.name} {binding.port} ← {_from(binding)}"
    for port in node.spec.columns:
        facts = "".join(f" {fact_text(fact)}" for fact in port.facts)
        yield f"  gives {port.name} {port}{facts}{_wire(node.wire(port.name), port)}"


def _from(binding: Binding) -> str:
    output = f".{binding.source.name}" if binding.source is not None else ""
    via = f" by {binding.via}" if binding.via != binding.producer else ""
    how = ", made of others" if binding.derived else ", once a group" if binding.once else ""
    back = f", delay {binding.decl.delay}, max_lag {binding.decl.max_lag}" if binding.decl.delay else ""
    every = f", every {binding.decl.every}" if binding.decl.every > 1 else ""
    return f"{binding.producer}{output}{via}{how}{back}{every}"


def _wire(wire: Wire, port: Port) -> str:
    if not wire.written:
        return ": not written"
    match wire.form:
        case Bits():
            form = "bits"
        case PerRow(dim=dim):
            form = f"one a {dim}"
        case Prefix():
            form = "prefixes once"
        case _:
            form = ""
    said = [form] if form else []
    said += [f"as {wire.dtype}"] if wire.dtype and wire.dtype != port.dtype else []
    return f": {', '.join(said)}" if said else ""


def fact_text(fact: object) -> str:
    """A promise as it is written: `Below(vocab)`, `TiledOver(leaf)`, `Derivable(tokens)`."""
    said = [
        ", ".join(value) if isinstance(value, tuple) else str(value)
        for value in msgspec.structs.astuple(fact)  # type: ignore[arg-type]
        if value and not callable(value)
    ]
    return f"{type(fact).__name__}({', '.join(said)})" if said else type(fact).__name__
