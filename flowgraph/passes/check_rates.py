"""FG4xx: rows are of the kind that their reader takes, the lag is bounded, steps are made. Cycles: `cycles.py`."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.fixed import fixed, fixed_value
from flowgraph.passes.sizes import rows_per_step
from flowgraph.spec.config import build_config
from flowgraph.spec.types import ROW_KINDS


def check_lag(graph: Graph) -> Iterator[Diagnostic]:
    """FG405: a hop that needs the largest lag finds it stated at the back edge."""
    if any(given.unsure for decl in graph.file.hops.values() for given in decl.inputs.values()):
        return
    needy = [
        (node, param)
        for node in graph.nodes.values()
        for param in node.spec.params
        if param.origin == "seam" and param.required and fixed_value(graph, node, param) is None
    ]
    own = [
        (node, param, binding) for node, param in needy if (binding := node.binding(param.detail)) is not None
    ]
    for node, param, binding in own:
        message = f"hop {node.name} needs {param.fact}, and its input {param.detail} states none"
        help = f"write {param.detail}: {{from: {binding.decl.ref}, delay: 1, {param.fact}: 0}}"
        yield Diagnostic("FG405", binding.decl.place, message, help)
    if needy and not own and not graph.broken and not _lacks_input(graph):
        node, param = needy[0]
        message = f"hop {node.name} needs {param.fact}, and no back edge of the graph states one"
        yield Diagnostic(
            "FG405", node.place, message, "add a hop that reads version: {from: sync, delay: 1, max_lag: 0}"
        )


def _lacks_input(graph: Graph) -> bool:
    """Whether some hop lacks an input that would be the back edge; that has a finding of its own."""
    return any(
        not p.optional and n.binding(p.name) is None for n in graph.nodes.values() for p in n.spec.inputs
    )


def check_staleness(graph: Graph) -> Iterator[Diagnostic]:
    """FG402: the staleness bound ceil(N/B) − 1 + Q + o stays within `max_lag`, and every k-th sync can be reached.

    N is what dispatch may admit, at most (max_lag + 1)·B, so what can break the bound is the train queue's depth Q.
    """
    lag = graph.max_lag
    if lag is None:
        return
    for node in graph.nodes.values():
        queue = node.capacity
        if node.spec.facts.collect and queue is not None and queue > lag:
            decl = graph.file.hops[node.name]
            stale = f"alone makes rows {queue} versions stale; max_lag is {lag}"
            message = f"a train queue of {queue} behind {node.name} {stale}"
            help = f"set capacity: {lag}, or raise max_lag to {queue}"
            yield Diagnostic("FG402", decl.capacity_place or decl.place, message, help)
        if any(p.initial is not None for p in node.spec.outputs):
            slow = max(
                (b for b in node.bindings if b.port.mode == "queue"), key=lambda b: b.decl.every, default=None
            )
            if slow is not None and slow.decl.every - 1 > lag:
                every = slow.decl.every
                what = f"{node.name} publishes every {every} steps, but max_lag is {lag}"
                message = f"{what}: step {lag + 1} would wait for ever"
                yield Diagnostic(
                    "FG402", slow.decl.place, message, f"set max_lag: {every - 1}, or every: {lag + 1}"
                )


def check_rows(graph: Graph) -> Iterator[Diagnostic]:
    """FG403: a row stream is of the kind that the reader takes; nothing reads rows that are made later."""
    for node in graph.nodes.values():
        for binding in node.bindings:
            producer, via = graph.nodes[binding.producer], graph.nodes[binding.via]
            if graph.doubtful(via):
                continue
            if binding.port.kind == "rows" and via.kind != binding.port.row_kind:
                wanted = binding.port.row_kind
                message = f"{binding.via} makes {via.kind or 'no'} rows, but {node.name} takes {wanted} rows"
                help = f"feed {binding.port.name} from a hop that makes {wanted} rows"
                yield Diagnostic("FG403", binding.decl.place, message, help)
            elif binding.is_column and _is_later(producer, node) and not graph.doubtful(node):
                what = f"{binding.producer}.{binding.source.name if binding.source else ''}"
                message = f"{node.name} works on {node.kind} rows, but {what} exists once a {producer.kind}"
                yield Diagnostic(
                    "FG403", binding.decl.place, message, f"move {node.name} behind {binding.producer}"
                )


def _is_later(producer: Node, reader: Node) -> bool:
    if producer.kind is None or reader.kind is None:
        return False
    return ROW_KINDS.index(producer.kind) > ROW_KINDS.index(reader.kind)


def check_steps(graph: Graph) -> Iterator[Diagnostic]:
    """FG404: the ring reaches a step; without one the run would never end."""
    unread = graph.broken or "hops" in graph.file.partial
    if graph.nodes and not unread and not any(n.spec.facts.collect for n in graph.nodes.values()):
        message = "no hop collects trajectories into steps, so a run would never end"
        yield Diagnostic(
            "FG404", graph.file.place, message, "add a batch hop such as hops.batch.oldest_first"
        )


def check_capacity(graph: Graph) -> Iterator[Diagnostic]:
    """FG404: a fold that a batch is collected from has room for a whole one; else both would wait for ever."""
    for node in graph.nodes.values():
        for binding in node.bindings:
            pool = graph.nodes[binding.via]
            if not (node.spec.facts.collect and binding.port.kind == "rows" and pool.spec.facts.room):
                continue
            room, needed = _room(graph, pool), int(rows_per_step(pool.kind, graph.dims))
            if room is not None and room < needed:
                decl = graph.file.hops[pool.name]
                place = decl.config.place if decl.config is not None else decl.place
                message = f"{pool.name} has room for {room} {pool.kind} rows, but {node.name} needs {needed} for a step"
                yield Diagnostic("FG404", place, message, f"give {pool.name} room for at least {needed}")


def _room(graph: Graph, node: Node) -> int | None:
    """What a fold takes before anything has come; None when it can't be said without a resource or a wrong option."""
    spec = node.spec
    assert spec.facts.room is not None
    given = {p.name: p.default for p in spec.params if not p.required} | fixed(graph, node)
    try:
        config = build_config(spec, node.config)
        if spec.facts.validate is not None:
            spec.facts.validate(**config)
        given |= config
        return int(spec.facts.room(spec.state(), **given))
    except Exception:  # a user's code; a wrong option has a finding of its own
        return None
