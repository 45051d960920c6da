"""lower: a checked graph becomes a plan: columns priced, blocks sized, every port bound to bytes or messages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence

from flowgraph.errors import CheckError
from flowgraph.ir.graph import Binding, Graph, Node, collects, is_offsets, repeats
from flowgraph.models import facts
from flowgraph.passes.fixed import fixed
from flowgraph.passes.pipeline import load
from flowgraph.passes.rates import every, makes_rows, trigger
from flowgraph.passes.sizes import evaluate, size_of, slots, value_bytes
from flowgraph.passes.staleness import queue_depth
from flowgraph.plan.layout import aligned, tensor_bytes
from flowgraph.plan.plan import Column, Gather, Hop, Owner, Plan, Read, TensorSlot, Watch
from flowgraph.plan.seams import seams
from flowgraph.spec.dims import parse
from flowgraph.spec.ports import Port

FRAME = 8  # bytes around one text, and around a list of values
OVERHEAD = 64  # room to align a set of tensors inside a block


def lower(graph: Graph) -> Plan:
    """Pure but for reading model configs. The graph has no findings."""
    lag = graph.max_lag or 0
    read = {(b.producer, b.source.name) for _, b in graph.columns() if b.source is not None}
    fires = every(graph)
    hops = {name: _hop(graph, node, read, fires[name]) for name, node in graph.nodes.items()}
    overlap = lag > 0
    owners = {name: _owner(graph, name, hops, overlap) for name in _used_owners(graph)}
    return Plan(
        graph=graph.file.name,
        doc=graph.file.doc,
        dims=graph.dims,
        run=graph.file.run,
        max_lag=lag,
        overlap=overlap,
        owners=owners,
        hops=hops,
        seams=tuple(seams(graph, hops)),
    )


def compile_file(path: str, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a graph file. Raises CheckError with all findings."""
    loaded = load(path, overrides)
    if loaded.diagnostics or loaded.graph is None:
        raise CheckError(loaded.diagnostics)
    return lower(loaded.graph)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _used_owners(graph: Graph) -> list[str]:
    used = {node.owner for node in graph.nodes.values()}
    return [name for name in graph.owners if name in used or name == "driver"]


def _owner(graph: Graph, name: str, hops: dict[str, Hop], overlap: bool) -> Owner:
    """Threads: without overlap the owners run in turn and each may take every core; with it they share them."""
    decl = graph.owners[name]
    arena = sum(h.slots * h.block_bytes for h in hops.values() if h.owner == name)
    heavy = [o for o in _used_owners(graph) if graph.owners[o].engine or graph.owners[o].learner]
    share = cores() if not overlap else max(1, cores() // max(1, len(heavy)))
    threads = decl.threads or (share if name in heavy else 1)
    context = int(size_of("prompt", graph.dims, "max", 0) + size_of("response", graph.dims, "max", 0))
    needs = any("tokenizer" in h.resources.values() for h in hops.values() if h.owner == name)
    tokenizer = graph.tokenizer_model(name) if needs else None
    return Owner(name, threads, arena, decl.engine, decl.learner, tokenizer, context if decl.engine else 0)


# --- hops ------------------------------------------------------------------------------------------------------


def _hop(graph: Graph, node: Node, read: set[tuple[str, str]], fires: int) -> Hop:
    spec = node.spec
    facts_ = spec.facts
    columns = tuple(_column(graph, node, port, (node.name, port.name) in read) for port in spec.columns)
    written = [c for c in columns if c.crosses]
    block = sum(aligned(c.max_bytes) for c in written) + (OVERHEAD if written else 0)
    dims = _dims(columns)
    return Hop(
        name=node.name,
        use=spec.use,
        kind=facts_.kind,
        owner=node.owner,
        rows=node.kind,
        makes_rows=makes_rows(node),
        concurrent=inspect.iscoroutinefunction(spec.function),
        lifetime=facts_.lifetime,
        columns=columns,
        dims=dims,
        bounds=_bounds(graph, node, columns, dims),
        reads=tuple(_read(graph, node, b) for b in node.bindings if b.is_column),
        watches=tuple(_watch(b) for b in node.bindings if not b.is_column),
        trigger=trigger(graph, node),
        outputs={p.name: _output(p) for p in spec.outputs},
        initial={p.name: p.initial for p in spec.outputs if p.initial is not None},
        config=node.config,
        bound=fixed(graph, node),
        resources={p.name: p.detail for p in spec.params if p.origin == "resource"},
        uses=facts_.uses,
        slots=slots(graph, node) if written else 0,
        block_bytes=aligned(block, 64),
        queue=_queue(graph, node),
        every=fires,
        place=str(spec.place),
        doc=spec.doc,
    )


def _output(port: Port) -> str:
    """What becomes of an output: rows that are made differ from those that are only shown."""
    return "latest" if port.kind == "rows" and port.mode == "latest" else port.kind


def _queue(graph: Graph, node: Node) -> int:
    """Rows that may wait unread: what the file says, else as many steps as the lag allows, else one."""
    if node.spec.facts.collect:
        return queue_depth(graph, node)
    return 1 if node.capacity is None else node.capacity


def _column(graph: Graph, node: Node, port: Port, crosses: bool) -> Column:
    shape = tuple(str(d) for d in port.shape)
    tensors = _tensors(graph, node) if port.kind == "tensors" else ()
    mean, bound = _bytes(graph, node, port, tensors)
    return Column(
        name=port.name,
        kind=port.kind,
        dtype=port.dtype,
        shape=shape,
        type=str(port),
        facts=tuple(_fact(f) for f in port.facts),
        mean_bytes=mean,
        max_bytes=bound,
        crosses=crosses,
        tensors=tensors,
    )


def _fact(fact: object) -> str:
    dim = getattr(fact, "dim", "")
    return f"{type(fact).__name__}({dim})" if dim else type(fact).__name__


def _bytes(graph: Graph, node: Node, port: Port, tensors: tuple[TensorSlot, ...]) -> tuple[float, int]:
    """Mean and bound of one row's value."""
    if port.kind == "tensors":
        total = sum(tensor_bytes(t) for t in tensors)
        return float(total), total
    mean, bound = (value_bytes(port, node.kind, graph.dims, which) for which in ("mean", "max"))
    if port.kind == "text" or (
        port.kind == "json" and port.shape
    ):  # quotes, commas, lengths: around each value
        bound += FRAME * (1 + bound / max(1, port.max))
    return mean, int(bound)


def _tensors(graph: Graph, node: Node) -> tuple[TensorSlot, ...]:
    """The model's table of tensors, in the dtype that the learner computes in; () while the model is unknown."""
    owner = graph.owners[node.owner]
    known = facts(owner.model) if owner.model else None
    if known is None:
        return ()
    dtype = owner.learner.dtype if owner.learner else None
    return tuple(TensorSlot(t.name, tuple(t.shape), dtype or t.dtype) for t in known.tensors)


def _dims(columns: tuple[Column, ...]) -> tuple[str, ...]:
    """What a block must record of its sizes: one entry a dim expression, `#name` for the bytes of what is no array."""
    names: list[str] = []
    for column in columns:
        if column.crosses:
            names += [d for d in column.shape if column.kind == "array" and d not in names]
            names += [f"#{column.name}"] if column.kind != "array" else []
    return tuple(names)


def _bounds(graph: Graph, node: Node, columns: tuple[Column, ...], dims: tuple[str, ...]) -> tuple[int, ...]:
    """The largest size of each of `dims`, on one row."""
    opaque = {f"#{c.name}": c.max_bytes for c in columns}
    return tuple(
        opaque[d] if d in opaque else int(evaluate(parse(d), node.kind, graph.dims, "max")) for d in dims
    )


def _read(graph: Graph, node: Node, binding: Binding) -> Read:
    assert binding.source is not None
    producer = graph.nodes[binding.producer]
    gather: Gather = "same"
    if repeats(binding.source, producer, binding.port, node):
        gather = "repeat"
    elif collects(producer, node) and not binding.source.shape:
        gather = "each"
    elif collects(producer, node):
        gather = "offsets" if is_offsets(binding.source.shape[0]) else "concat"
    return Read(binding.port.name, binding.producer, binding.source.name, binding.via, gather)


def _watch(binding: Binding) -> Watch:
    output = binding.source.name if binding.source is not None else ""
    return Watch(
        binding.port.name, binding.via, output, binding.port.mode, binding.port.row_kind, binding.decl.every
    )
