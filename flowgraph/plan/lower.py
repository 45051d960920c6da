"""lower: a rewritten graph becomes a plan: columns priced, blocks sized, every port bound to bytes or messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.fixed import fixed
from flowgraph.passes.order import every, in_order, makes_rows, triggers
from flowgraph.passes.sizes import evaluate, size_of, slots
from flowgraph.passes.staleness import queue_depth, room
from flowgraph.plan.columns import column, dims_of, read
from flowgraph.plan.layout import aligned
from flowgraph.plan.plan import Column, Hop, Owner, Plan, Watch
from flowgraph.plan.seams import seams, unread
from flowgraph.spec.dims import parse
from flowgraph.spec.outputs import asks
from flowgraph.spec.ports import Port
from flowgraph.spec.types import Held

OVERHEAD = 64  # room to align a set of tensors inside a block


def lower(graph: Graph, passes: Collection[str] = (), *, verify: bool = False) -> Plan:
    """Pure but for reading model configs. The graph has no findings. passes: those that it went through."""
    before = triggers(graph)
    fires = every(graph)
    known = frozenset(graph.by_column())
    groups = _groups(graph, before)
    hops = {
        name: _hop(graph, node, known, before[name], groups.get(node.group, ()), fires[name])
        for name, node in graph.nodes.items()
    }
    hops = shared(hops)
    return Plan(
        graph=graph.file.name,
        doc=graph.file.doc,
        dims=graph.file.dims,
        run=graph.file.run,
        max_lag=graph.max_lag or 0,
        passes=tuple(passes),
        verify=verify,
        owners=_owners(graph, hops),
        hops=hops,
        seams=tuple(seams(graph, hops)),
        budgets=tuple(graph.file.budgets),
        unread=unread(graph, hops),
    )


def _groups(graph: Graph, before: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Head → the hops that fire with it, each after those that it waits for: file order will not do."""
    members: dict[str, list[str]] = {}
    for node in graph.nodes.values():
        if node.group:
            members.setdefault(node.group, []).append(node.name)
    if not members:
        return {}
    place = {name: i for i, name in enumerate(in_order(before))}
    return {head: tuple(sorted(names, key=place.__getitem__)) for head, names in members.items()}


def shared(hops: dict[str, Hop]) -> dict[str, Hop]:
    """What several hops of a group read in the same way is read once, by the first of them."""
    out = dict(hops)
    for head in (h for h in hops.values() if h.group and h.heads):
        seen: set[tuple[str, str, str, bool]] = set()
        for name in head.group:
            reads = []
            for one in hops[name].reads:
                key = one.producer, one.column, one.gather, one.narrow
                array = hops[one.producer].column(one.column).kind == "array"
                # How many leaves a trajectory has may be known only after the first of them.
                alike = one.gather != "repeat" or hops[name].rows != "trajectory"
                if array and alike and not one.handed and not one.derive:
                    one = msgspec.structs.replace(one, handed=True, needs=()) if key in seen else one
                    seen.add(key)
                reads.append(one)
            out[name] = msgspec.structs.replace(hops[name], reads=tuple(reads))
    return out


# --- owners ----------------------------------------------------------------------------------------------------


def _owners(graph: Graph, hops: Mapping[str, Hop]) -> dict[str, Owner]:
    """Threads: without overlap the owners run in turn and each may take every core; with it they share them."""
    used = {h.owner for h in hops.values()} | {"driver"}
    names = [name for name in graph.owners if name in used]
    heavy = [o for o in names if graph.owners[o].engine or graph.owners[o].learner]
    arena = dict.fromkeys(names, 0)
    maps = {name: {name} for name in names}
    tokenizer = set()
    for hop in hops.values():
        for place in {hop.owner, hop.home}:
            arena[place] += hop.slots * hop.block_bytes
        for one in hop.reads:
            maps[hop.owner] |= {hops[p].home for p in one.producers()}
        if "tokenizer" in hop.resources.values():
            tokenizer.add(hop.owner)
    # The driver moves what passes through it, and frees what others wrote.
    maps["driver"] |= {h.owner for h in hops.values() if h.home != h.owner}
    context = int(size_of("prompt", graph.dims, "max", 0) + size_of("response", graph.dims, "max", 0))
    share = max(1, len(heavy)) if graph.max_lag else 1
    out = {}
    for name in names:
        decl = graph.owners[name]
        out[name] = Owner(
            name=name,
            threads=decl.threads or (0 if name in heavy else 1),
            share=share,
            arena_bytes=arena[name],
            maps=tuple(n for n in names if n in maps[name] or not graph.mapped),
            engine=decl.engine,
            learner=decl.learner,
            tokenizer=graph.tokenizer_model(name) if name in tokenizer else None,
            context=context if decl.engine else 0,
            ranks=decl.ranks,
        )
    return out


# --- hops ------------------------------------------------------------------------------------------------------


def _hop(
    graph: Graph,
    node: Node,
    known: Collection[tuple[str, str]],
    trigger: tuple[str, ...],
    group: tuple[str, ...],
    fires: int,
) -> Hop:
    spec = node.spec
    columns = tuple(column(graph, node, port, known) for port in spec.columns)
    written = [c for c in columns if c.written]
    block = sum(aligned(c.max_bytes) for c in written) + (OVERHEAD if written else 0)
    dims = dims_of(columns)
    return Hop(
        name=node.name,
        use=spec.use,
        kind=spec.facts.kind,
        owner=node.owner,
        rows=node.kind,
        makes_rows=makes_rows(node),
        concurrent=inspect.iscoroutinefunction(spec.function),
        lifetime=spec.facts.lifetime,
        columns=columns,
        dims=dims,
        bounds=_bounds(graph, node, columns, dims),
        reads=tuple(read(graph, node, b) for b in node.bindings if b.is_column),
        watches=tuple(_watch(b) for b in node.bindings if not b.is_column),
        trigger=trigger,
        group=group,
        home="driver" if node.relayed and written else node.owner,
        outputs={p.name: _output(p) for p in spec.outputs},
        initial={p.name: p.initial for p in spec.outputs if p.initial is not None},
        config=node.config,
        bound=fixed(graph, node),
        resources={p.name: p.detail for p in spec.params if p.origin == "resource"},
        uses=spec.facts.uses,
        slots=slots(graph, node) if written else 0,
        block_bytes=aligned(block, 64),
        queue=_queue(graph, node),
        every=fires,
        place=str(spec.place),
        doc=spec.doc,
        room=room(graph, node) if spec.facts.kind == "fold" else None,
        in_place=_asked(spec.function, columns),
    )


def _asked(function: Callable[..., Any], columns: Iterable[Column]) -> tuple[str, ...]:
    """Columns of whose memory a hop's code asks: those in its ports' dtypes, and those whose dtype it names."""
    named = asks(function)
    if named is None:
        return ()
    return tuple(c.name for c in columns if c.kind == "array" and (c.stored == c.dtype or c.name in named))


def _output(port: Port) -> str:
    """What becomes of an output: rows that are made differ from those that are shown, handed on, or held."""
    if port.dtype == Held.__name__:
        return "held"
    return ("latest" if port.mode == "latest" else "handed") if port.handed else port.kind


def _queue(graph: Graph, node: Node) -> int:
    """Rows that may wait unread: what the file says, else as many steps as the lag allows, else one."""
    if node.spec.facts.collect:
        return queue_depth(graph, node)
    return 1 if node.capacity is None else node.capacity


def _bounds(graph: Graph, node: Node, columns: tuple[Column, ...], dims: tuple[str, ...]) -> tuple[int, ...]:
    """The largest size of each of `dims`, on one row."""
    opaque = {f"#{c.name}": c.max_bytes for c in columns}
    return tuple(
        opaque[d] if d in opaque else int(evaluate(parse(d), node.kind, graph.dims, "max")) for d in dims
    )


def _watch(binding: Binding) -> Watch:
    output = binding.source.name if binding.source is not None else ""
    return Watch(
        binding.port.name, binding.via, output, binding.port.mode, binding.port.row_kind, binding.decl.every
    )
