"""FG4xx: rows are of the kind that their reader takes, the lag is bounded, steps are made. Cycles: `cycles.py`."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.fixed import fixed_value
from flowgraph.passes.staleness import batch_size, deciding, pools_of, room
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
                makers = [n.name for n in graph.nodes.values() if n.kind == wanted and n is not node]
                known = f": {', '.join(makers)}" if makers else ""
                help = f"feed {binding.port.name} from a hop that makes {wanted} rows{known}"
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
        yield Diagnostic("FG404", graph.file.place, message, _add_batch(graph))


def _add_batch(graph: Graph) -> str:
    """The hops that make steps of what the last hop on trajectories gives."""
    last = next((n for n in reversed(graph.nodes.values()) if n.kind == "trajectory"), None)
    if last is None:
        return "`flowgraph init` writes a ring to start from"
    add, pool = "", last.name
    if last.spec.facts.room is None:
        pool = "buffer"
        add = f"buffer: {{use: hops.buffer.ready, in: {{trajectory: {last.name}, taken: batch, dropped: batch}}}} and "
    return f"add {add}batch: {{use: hops.batch.oldest_first, in: {{ready: {pool}}}}} under hops:"


def check_capacity(graph: Graph) -> Iterator[Diagnostic]:
    """FG404: a fold that a batch is collected from has room for a whole one; else both would wait for ever.

    Why that is enough: a deadlock is a ring of hops of which each waits for the next. All but one of the ring's queues
    are read row by row, so their reader never waits for a second row before it gives the first one on, and any
    capacity will do: the value of every hop on rows, a group that is being sampled, a step that waits to be trained.
    Only a batch waits for many rows, and only the pool before it makes their writer wait for room. A dispatcher
    samples group after group, so the first b rows in the pool and in flight are whole groups: with room for b they
    all finish, and are a batch. A row that is dropped frees its room.
    """
    for node in graph.nodes.values():
        for pool in pools_of(graph, node) if node.spec.facts.collect else ():
            size, needed = room(graph, pool), batch_size(graph, node)
            if size is not None and size < needed:
                option = deciding(graph, pool)
                message = f"{pool.name} has room for {size} {pool.kind} rows, but {node.name} needs {needed} for a step"
                more = f"set {option} for" if option else f"give {pool.name} room for"
                help = f"{more} at least {needed} rows, or lower dims.group"
                yield Diagnostic("FG404", graph.option_place(pool, option), message, help)
