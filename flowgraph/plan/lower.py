"""lower: a checked graph becomes a plan: columns priced, blocks sized, every port bound to bytes or messages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.models import facts
from flowgraph.passes.check import collects, tokenizer_model
from flowgraph.passes.sizes import evaluate, rows_per_step, size_of
from flowgraph.plan.layout import aligned, tensor_bytes
from flowgraph.plan.plan import Column, Gather, Hop, Owner, Plan, Read, Seam, SeamField, TensorSlot, Watch
from flowgraph.spec.dims import parse
from flowgraph.spec.hop import Port
from flowgraph.spec.types import LIFETIMES, dtype_of

OVERHEAD = 64  # room to align a set of tensors inside a block


def lower(graph: Graph) -> Plan:
    """Pure but for reading model configs. The graph has no findings."""
    lag = graph.max_lag or 0
    hops = {name: _hop(graph, node) for name, node in graph.nodes.items()}
    overlap = lag > 0
    owners = {name: _owner(graph, name, hops, overlap) for name in _used_owners(graph)}
    return Plan(
        graph.file.name, graph.file.doc, graph.dims, graph.file.run, lag, overlap, owners, hops, tuple(_seams(graph, hops))
    )  # fmt: skip


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
    node = next((n for n in graph.nodes.values() if n.owner == name), None)
    tokenizer = tokenizer_model(graph, node) if node is not None and needs else None
    return Owner(name, threads, arena, decl.engine, decl.learner, tokenizer, context if decl.engine else 0)


# --- hops ------------------------------------------------------------------------------------------------------


def _hop(graph: Graph, node: Node) -> Hop:
    spec = node.spec
    columns = tuple(_column(graph, node, port) for port in spec.columns)
    written = [c for c in columns if c.crosses]
    block = sum(aligned(c.max_bytes) for c in written) + (OVERHEAD if written else 0)
    reads = tuple(_read(graph, node, b) for b in node.bindings if not b.carries_rows and b.port.kind != "value")
    watches = tuple(_watch(b) for b in node.bindings if b.carries_rows or b.port.kind == "value")
    facts_ = spec.facts
    return Hop(
        name=node.name, use=spec.use, kind=facts_.kind, owner=node.owner, rows=node.kind,
        makes_rows=bool(facts_.source or facts_.expand or facts_.collect),
        concurrent=inspect.iscoroutinefunction(spec.function), lifetime=facts_.lifetime,
        columns=columns, dims=_dims(columns), bounds=_bounds(graph, node, columns), reads=reads, watches=watches, trigger=_trigger(graph, node),
        outputs={p.name: p.kind for p in spec.outputs},
        initial={p.name: p.initial for p in spec.outputs if p.initial is not None},
        config=node.config, bound=_bound(graph, node),
        resources={p.name: p.detail for p in spec.params if p.origin == "resource"}, uses=facts_.uses,
        slots=_slots(graph, node) if written else 0, block_bytes=aligned(block, 64),
        queue=node.capacity if node.capacity is not None else (graph.max_lag or 0) if facts_.collect else 1,
        every=max((b.decl.every for b in node.bindings if b.port.mode == "queue"), default=1),
        place=str(spec.place), doc=spec.doc,
    )  # fmt: skip


def _column(graph: Graph, node: Node, port: Port) -> Column:
    crosses = any(b.source == port for _, b in graph.readers(node.name))
    shape = tuple(str(d) for d in port.shape)
    tensors = _tensors(graph, node) if port.kind == "tensors" else ()
    mean, bound = _bytes(graph, node, port, tensors)
    return Column(
        port.name, port.kind, port.dtype, shape, str(port), tuple(_fact(f) for f in port.facts), mean, bound, crosses, tensors
    )  # fmt: skip


def _fact(fact: object) -> str:
    dim = getattr(fact, "dim", "")
    return f"{type(fact).__name__}({dim})" if dim else type(fact).__name__


def _bytes(graph: Graph, node: Node, port: Port, tensors: tuple[TensorSlot, ...]) -> tuple[float, int]:
    """Mean and bound of one row's value."""
    if port.kind == "tensors":
        total = sum(tensor_bytes(t) for t in tensors)
        return float(total), total
    counts = {"mean": 1.0, "max": 1.0}
    for which in counts:
        for dim in port.shape:
            counts[which] *= evaluate(dim, node.kind, graph.dims, which)  # type: ignore[arg-type]
    if port.kind == "array":
        width = dtype_of(port.dtype).itemsize
        return counts["mean"] * width, int(counts["max"] * width)
    return counts["mean"] * port.mean, int(counts["max"] * port.max)


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


def _bounds(graph: Graph, node: Node, columns: tuple[Column, ...]) -> tuple[int, ...]:
    """The largest size of each entry of `_dims`, on one row."""
    opaque = {f"#{c.name}": c.max_bytes for c in columns}
    return tuple(
        opaque[d] if d in opaque else int(evaluate(parse(d), node.kind, graph.dims, "max")) for d in _dims(columns)
    )


def _read(graph: Graph, node: Node, binding: Binding) -> Read:
    assert binding.source is not None
    producer = graph.nodes[binding.producer]
    gather: Gather = "same"
    if collects(producer, node):
        if not binding.source.shape:
            gather = "repeat" if binding.port.shape and str(binding.port.shape[0]) == "leaf" else "each"
        else:
            gather = "offsets" if _is_offsets(binding.source) else "concat"
    return Read(binding.port.name, binding.producer, binding.source.name, binding.via, gather)


def _is_offsets(port: Port) -> bool:
    """A first dim `x+1` holds the bounds of x ranges, which shift when rows are joined."""
    terms = dict(port.shape[0].terms)
    return len(terms) == 2 and terms.get(()) == 1


def _watch(binding: Binding) -> Watch:
    output = binding.source.name if binding.source is not None else ""
    return Watch(binding.port.name, binding.via, output, binding.port.mode, binding.port.row_kind, binding.decl.every)


def _trigger(graph: Graph, node: Node) -> tuple[str, ...]:
    """For a hop on rows: the hops of the same kind that it follows or reads; every one must be there first."""
    if node.spec.facts.kind == "fold":
        return ()
    names = []
    for binding in node.bindings:
        for name in (binding.producer, binding.via):
            other = graph.nodes[name]
            gives_part = other.spec.facts.kind != "fold" or other.kind == node.kind and _makes(other)
            if binding.port.mode == "queue" and other.kind == node.kind and gives_part and name not in names:
                names.append(name)
    return tuple(names)


def _makes(node: Node) -> bool:
    return bool(node.spec.facts.source or node.spec.facts.expand or node.spec.facts.collect)


def _bound(graph: Graph, node: Node) -> dict[str, int]:
    """Parameters that come from dims, seams or the run."""
    values: dict[str, int] = {}
    for param in node.spec.params:
        if param.origin == "dim" and param.detail in graph.dims:
            values[param.name] = graph.dims[param.detail].max
        elif param.origin == "run":
            values[param.name] = getattr(graph.file.run, param.detail)
        elif param.origin == "seam":
            binding = node.binding(param.detail)
            value = getattr(binding.decl, param.fact) if binding is not None else None
            if value is None and param.fact == "max_lag":
                value = graph.max_lag
            if value is not None:
                values[param.name] = value
    return values


def _slots(graph: Graph, node: Node) -> int:
    """Blocks alive at once, by what the lag admits: (max_lag + 2) steps of trajectories, two versions of weights."""
    lag = graph.max_lag or 0
    if any(p.kind == "tensors" for p in node.spec.columns):
        return 2
    if node.kind in ("group", "trajectory"):
        return int((lag + 2) * rows_per_step(node.kind, graph.dims)) + 2
    return lag + 3


# --- seams -----------------------------------------------------------------------------------------------------


def _seams(graph: Graph, hops: dict[str, Hop]) -> Iterator[Seam]:
    """One seam for every (hop, reader) that the graph writes, in file order of the readers."""
    for node in graph.nodes.values():
        for source in dict.fromkeys(b.via for b in node.bindings):
            bindings = [b for b in node.bindings if b.via == source]
            fields = tuple(_field(graph, node, b, hops) for b in bindings if not b.carries_rows and b.port.kind != "value")
            control = tuple(b.port.name for b in bindings if b.carries_rows or b.port.kind == "value")
            producers = {f.producer for f in fields}
            crosses = any(hops[p].owner != node.owner for p in producers)
            lives = [hops[p].lifetime for p in producers] or [hops[source].lifetime]
            yield Seam(
                source, node.name, "control" if not fields else "shared memory" if crosses else "in process",
                max(lives, key=LIFETIMES.index), fields, control,
                max(b.decl.delay for b in bindings),
                next((b.decl.max_lag for b in bindings if b.decl.max_lag is not None), None),
                max(b.decl.every for b in bindings),
            )  # fmt: skip


def _field(graph: Graph, node: Node, binding: Binding, hops: dict[str, Hop]) -> SeamField:
    assert binding.source is not None
    column = hops[binding.producer].column(binding.source.name)
    read = next(r for r in hops[node.name].reads if r.port == binding.port.name)
    producer = graph.nodes[binding.producer]
    # A group's value that every trajectory reads is read once a trajectory, by reference to one copy.
    finest = node.kind if read.gather == "same" else "trajectory"
    every = binding.decl.every
    mean = column.mean_bytes * rows_per_step(finest, graph.dims, "mean") / every
    bound = column.max_bytes * rows_per_step(finest, graph.dims, "max")
    priced = column.kind != "tensors" or bool(column.tensors)
    return SeamField(
        binding.port.name, binding.producer, column.name, str(binding.port), column.facts, mean, int(bound), priced
    )  # fmt: skip
