"""Columns and reads of a plan: how each value lies in its block, and what a reader takes to get it back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from flowgraph.ir.graph import Binding, Graph, Node, collects, is_offsets, repeats
from flowgraph.ir.text import fact_text
from flowgraph.models import facts
from flowgraph.passes.companions import written_at
from flowgraph.passes.sizes import evaluate, stored_bytes, value_bytes
from flowgraph.plan.layout import tensor_bytes
from flowgraph.plan.plan import Column, Gather, Read, TensorSlot
from flowgraph.spec.dims import parse
from flowgraph.spec.facts import companions
from flowgraph.spec.forms import Bits, Derived, PerRow, Promise, Range, ports_of
from flowgraph.spec.ports import INTEGER, Port
from flowgraph.spec.types import Below, Derivable, LastToken, Mask, TiledOver

FRAME = 8  # bytes around one text, and around a list of values


def column(graph: Graph, node: Node, port: Port, read: Collection[tuple[str, str]]) -> Column:
    """read: (hop, column) of all that anybody reads."""
    wire = node.wire(port.name)
    tensors = _tensors(graph, node) if port.kind == "tensors" else ()
    mean, bound = _bytes(graph, node, port, tensors) if wire.written else (0.0, 0)
    shape = tuple(str(d) for d in port.shape)
    return Column(
        name=port.name,
        kind=port.kind,
        dtype=port.dtype,
        shape=shape,
        type=str(port),
        facts=tuple(fact_text(f) for f in port.facts),
        mean_bytes=mean,
        max_bytes=bound,
        read=(node.name, port.name) in read,
        written=wire.written,
        form=wire.form,
        stored=wire.dtype or port.dtype,
        stored_shape=(wire.form.dim,) if isinstance(wire.form, PerRow) else shape,
        promises=tuple(_promises(graph, node, port)),
        tensors=tensors,
        each=port.max,
    )


def _promises(graph: Graph, node: Node, port: Port) -> Iterator[Promise]:
    """What can be checked of a column's content while the graph runs. Shared prefixes are lossless anyway."""
    for fact in port.facts:
        match fact:
            case Mask():
                yield Bits()
            case LastToken() | TiledOver():
                bounds, mask = companions(node.spec, port, fact)
                yield PerRow(fact.dim, bounds, mask, isinstance(fact, LastToken))
            case Below():
                with contextlib.suppress(KeyError):  # a dim of a model that is not there yet
                    yield Range(int(evaluate(parse(fact.bound), node.kind, graph.dims, "max")))
            case Derivable():
                yield Derived(path_of(fact), fact.sources)


def path_of(fact: Derivable) -> str:
    return f"{fact.by.__module__}.{fact.by.__qualname__}"


def _bytes(graph: Graph, node: Node, port: Port, tensors: tuple[TensorSlot, ...]) -> tuple[float, int]:
    """Mean and bound of one row's value as it lies."""
    if port.kind == "tensors":
        total = sum(tensor_bytes(t) for t in tensors)
        return float(total), total
    wire = node.wire(port.name)
    mean, bound = (stored_bytes(port, wire, node.kind, graph.dims, which) for which in ("mean", "max"))
    if port.kind == "text" or (port.kind == "json" and port.shape):
        # quotes, commas, lengths: around each value
        bound += FRAME * (1 + value_bytes(port, node.kind, graph.dims, "max") / max(1, port.max))
    return mean, int(bound)


def _tensors(graph: Graph, node: Node) -> tuple[TensorSlot, ...]:
    """The model's table of tensors, in the dtype that the learner gives them in; () while the model is unknown."""
    owner = graph.owners[node.owner]
    known = facts(owner.model) if owner.model else None
    if known is None:
        return ()
    dtype = owner.learner.given if owner.learner else None
    return tuple(TensorSlot(t.name, tuple(t.shape), dtype or t.dtype) for t in known.tensors)


# --- reads -----------------------------------------------------------------------------------------------------


def read(graph: Graph, node: Node, binding: Binding) -> Read:
    """How a hop gets the column that one of its ports is bound to."""
    writer = graph.nodes[binding.producer]
    handed = bool(node.group) and node.group == writer.group
    return _read(graph, node, binding, handed, binding.once)


def _read(graph: Graph, node: Node, binding: Binding, handed: bool, once: bool) -> Read:
    assert binding.source is not None
    writer = graph.nodes[binding.producer]
    sources = ports_of(writer.wire(binding.source.name).form)
    derive = ""
    if binding.derived and not handed:
        fact = next(f for f in binding.source.facts if isinstance(f, Derivable))
        derive, sources = path_of(fact), fact.sources
    return Read(
        port=binding.port.name,
        producer=binding.producer,
        column=binding.source.name,
        via=binding.via,
        gather=_gather(binding, writer, node),
        same_rows=writer.kind == _rows_of(node),
        needs=() if handed else tuple(_of_writer(graph, writer, name, once) for name in sources),
        derive=derive,
        handed=handed,
        once=once,
        narrow=binding.port.dtype == INTEGER,
    )


def _rows_of(node: Node) -> str | None:
    """The rows that a hop reads columns on: a fold's are those that it is shown."""
    if node.spec.facts.kind == "fold":
        return next((b.port.row_kind for b in node.bindings if b.port.kind == "rows"), None)
    return node.kind


def _of_writer(graph: Graph, writer: Node, port: str, once: bool) -> Read:
    """A value of the writer's own firing, as a reader gets at it: an output of its own, or what it read.

    once: whether the reader reads the writer's rows once each, and so what they take
    """
    at = written_at(graph, writer, port)
    assert at is not None
    if at[0] is not writer:
        binding = writer.binding(port)
        assert binding is not None
        return _read(graph, writer, binding, handed=False, once=once)
    needs = tuple(_of_writer(graph, writer, name, once) for name in ports_of(writer.wire(port).form))
    return Read(port, writer.name, port, writer.name, "same", needs=needs, once=once)


def _gather(binding: Binding, writer: Node, node: Node) -> Gather:
    source = binding.source
    assert source is not None
    if repeats(source, writer, binding.port, node):
        return "repeat"
    if not collects(writer, node):
        return "same"
    if not source.shape:
        return "each"
    return "offsets" if is_offsets(source.shape[0]) else "concat"


def dims_of(columns: tuple[Column, ...]) -> tuple[str, ...]:
    """What a block must record of its sizes: one entry a dim expression, `#name` for the bytes of what says none."""
    names: dict[str, None] = {}
    for one in columns:
        if one.kind == "array":  # whoever reads it: the driver counts rows in leaves and tokens
            names |= dict.fromkeys(one.shape)
        if one.written and one.opaque:
            names[f"#{one.name}"] = None
        elif one.written:
            names |= dict.fromkeys(one.stored_shape)
    return tuple(names)
