"""FG406: a fold that keeps count of rows is told of each, and not before or after what it counts has happened."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic, Note
from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.order import every, thinned
from flowgraph.spec.types import ROW_KINDS, RowKind


def check_events(graph: Graph) -> Iterator[Diagnostic]:
    """FG406: a dispatcher counts a row as finished where the pool takes it, a pool lets go of it when it is taken."""
    if graph.broken or "hops" in graph.file.partial:
        return
    fires = every(graph)
    for node in graph.nodes.values():
        if node.spec.facts.kind == "fold":
            yield from _early(graph, node)
        # One that gives nothing only looks on.
        if node.spec.facts.collect:
            yield from _sent(graph, node)
        if node.spec.facts.kind == "fold" and node.spec.outputs:
            yield from _skipped(graph, node, fires)
            yield from _finished(graph, node)
            yield from _taken(graph, node)


def _skipped(graph: Graph, node: Node, fires: dict[str, int]) -> Iterator[Diagnostic]:
    """What a hop skips is never finished, and has none of its columns; who counts rows needs all of them."""
    for binding in node.bindings:
        k = fires[binding.via]
        if k == 1 or not binding.carries_rows:
            continue
        message = f"{node.name} takes every row of {binding.via}, but {binding.via} fires on one of {k}"
        cause = thinned(graph, graph.nodes[binding.via])
        notes = (Note(cause.decl.place, f"{binding.via} skips the others from here on"),) if cause else ()
        yield Diagnostic("FG406", binding.decl.place, message, f"remove every: {k}", notes)


def _early(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    """What a fold reads of a row is there when it is told of the row. A queue gets a row when every hop is done."""
    for binding in (b for b in node.bindings if b.is_column):
        writer = graph.nodes[binding.producer]
        first = next((p.name for p in node.spec.inputs if p.kind == "rows"), "")
        for event in _events(node, writer.kind) if writer.kind else ():
            # Of rows that come by another port it reads no columns.
            if event.port.name != first or _is_behind(graph, event.via, writer.name):
                continue
            name = binding.port.name
            message = f"{node.name} is told of a {writer.kind} by {event.via}, before {writer.name} gives it its {name}"
            notes = (Note(binding.decl.place, f"{name} is read here"),)
            help = f"write {event.port.name}: {writer.name}"
            yield Diagnostic("FG406", event.decl.place, message, help, notes)


def _sent(graph: Graph, batch: Node) -> Iterator[Diagnostic]:
    """A batch that is told of the rows which it collects, beside being handed them, is told when they are sent.

    From whoever works on them later it would learn nothing of those that are in flight.
    """
    assert batch.spec.facts.collect is not None
    for event in _events(batch, batch.spec.facts.collect[0]):
        makers = [
            n.name for n in graph.nodes.values() if n.spec.facts.expand and n.kind == event.port.row_kind
        ]
        if event.via not in makers and len(makers) == 1:
            message = f"{batch.name} is told of {event.port.name} rows by {event.via}, when they are in flight no more"
            yield Diagnostic("FG406", event.decl.place, message, f"write {event.port.name}: {makers[0]}")


def _finished(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    """A row that a dispatcher makes is in flight until the pool has it: both learn of it behind the same hop.

    Else what is between the two is at neither, and more is sent than the pool has room for. An event from further
    behind is as good: a queue gets a row when every hop on it is done.
    """
    expand = node.spec.facts.expand
    told = _events(node, expand[1]) if expand else []
    if not told:
        return
    for pool, taken in _takes(graph, node):
        if any(_is_behind(graph, event.via, taken.via) for event in told):
            continue
        event = told[0]
        message = (
            f"{node.name} is told of {event.port.name} rows by {event.via}, before {pool.name} takes them "
            f"from {taken.via}"
        )
        notes = (Note(taken.decl.place, f"{pool.name} takes them here"),)
        help = f"write {event.port.name}: {taken.via}"
        yield Diagnostic("FG406", event.decl.place, message, help, notes)


def _taken(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    """A pool shows a row until it is told that a batch has it; told later, it shows it to the next batch too."""
    shown = [p.row_kind for p in node.spec.outputs if p.kind == "rows" and p.mode == "latest"]
    for kind in shown:
        later = ROW_KINDS[ROW_KINDS.index(kind) + 1 :] if kind is not None else ()
        for event in (b for k in later for b in _events(node, k)):
            batch = next((n for n in graph.upstream(graph.nodes[event.via]) if n.spec.facts.collect), None)
            if graph.nodes[event.via].spec.facts.collect or batch is None:
                continue
            message = (
                f"{node.name} is told by {event.via} of what {batch.name} takes, and shows it until then"
            )
            help = f"write {event.port.name}: {batch.name}"
            yield Diagnostic("FG406", event.decl.place, message, help)


def _events(node: Node, kind: RowKind) -> list[Binding]:
    return [b for b in node.bindings if b.carries_rows and b.port.mode == "event" and b.port.row_kind == kind]


def _takes(graph: Graph, maker: Node) -> Iterator[tuple[Node, Binding]]:
    """The folds whose queue the rows of a maker reach first, each with that queue."""
    for node in graph.nodes.values():
        for binding in node.bindings if node.spec.facts.kind == "fold" and node.spec.outputs else ():
            handed = binding.source is not None and binding.source.handed
            queue = binding.carries_rows and binding.port.mode == "queue" and not handed
            if queue and binding.port.row_kind == maker.kind and _is_behind(graph, binding.via, maker.name):
                yield node, binding


def _is_behind(graph: Graph, hop: str, other: str) -> bool:
    """Whether `hop` is `other`, or works on rows that come from it."""
    return hop == other or graph.nodes[other] in graph.upstream(graph.nodes[hop])
