"""FG406: what is made is taken, and what is read is there: the balance of the queues."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic, Note
from flowgraph.ir.graph import Graph, Node, repeats
from flowgraph.passes.order import every, thinned
from flowgraph.passes.sizes import rows_per_step, size_of
from flowgraph.passes.staleness import batch_size, makers_of


def check_balance(graph: Graph) -> Iterator[Diagnostic]:
    """FG406: no column is gathered from rows that its writer skips, and no batch is fed more than it takes."""
    yield from _ignored(graph)
    if not graph.broken and "hops" not in graph.file.partial:
        yield from _skipped(graph)
        yield from _too_much(graph)
        yield from _unexpanded(graph)


def _ignored(graph: Graph) -> Iterator[Diagnostic]:
    """`every:` thins out what makes a hop fire; a fold sees all there is, and a sampled value is always the newest."""
    for node in graph.nodes.values():
        for binding in node.bindings:
            mode = binding.port.mode
            if binding.decl.every == 1 or not (node.spec.facts.kind == "fold" or mode == "latest"):
                continue
            reads = (
                "samples"
                if mode == "latest"
                else "takes every row of"
                if binding.carries_rows
                else "is told of all by"
            )
            message = f"{node.name} {reads} {binding.via}, so every: {binding.decl.every} can't thin it out"
            help = f"remove every:, or set it where a hop that is no fold reads {binding.via}"
            yield Diagnostic("FG406", binding.decl.place, message, help)


def _skipped(graph: Graph) -> Iterator[Diagnostic]:
    """A hop that fires on each k-th row has its columns there alone; rows that come of all of them miss the rest."""
    fires = every(graph)
    said = set()
    for node, binding in graph.columns():
        writer = graph.nodes[binding.producer]
        k = fires[writer.name]
        if k == 1 or writer.kind == node.kind or graph.doubtful(node) or (node.name, writer.name) in said:
            continue
        said.add((node.name, writer.name))
        gathers = f"{node.name} gathers {binding.port.name} from every {writer.kind}"
        message = f"{gathers}, but {writer.name} fires on one of {k}"
        cause = thinned(graph, writer)
        notes = (Note(cause.decl.place, f"{writer.name} skips the others from here on"),) if cause else ()
        yield Diagnostic("FG406", binding.decl.place, message, f"remove every: {k}", notes)


def _too_much(graph: Graph) -> Iterator[Diagnostic]:
    """One batch, one maker of its rows: with two, each as large as the dims say, one batch a step is left over."""
    for batch in (n for n in graph.nodes.values() if n.spec.facts.collect):
        makers = sorted(makers_of(graph, batch), key=lambda n: n.place)
        if len(makers) < 2:
            continue
        made, taken = sum(rows_per_step(n.kind, graph.dims) for n in makers), batch_size(graph, batch)
        names = " and ".join(n.name for n in makers)
        message = f"{names} make {made:g} {makers[0].kind} rows a step, and {batch.name} takes {taken}"
        notes = (Note(makers[0].place, f"makes {rows_per_step(makers[0].kind, graph.dims):g} of them"),)
        help = f"remove {makers[-1].name}, or give it a batch of its own"
        yield Diagnostic("FG406", makers[-1].place, message, help, notes)


def _unexpanded(graph: Graph) -> Iterator[Diagnostic]:
    """Groups that a source makes are sampled into trajectories."""
    expands = [n for n in graph.nodes.values() if n.spec.facts.expand or n.spec.facts.collect]
    read = {n.name for expand in expands for n in graph.upstream(expand)}
    for node in graph.nodes.values():
        if node.spec.facts.source and node.name not in read:
            message = (
                f"{node.name} makes {node.kind} rows, and no hop takes them: it stops when its queue is full"
            )
            help = f"feed it to a dispatcher such as hops.dispatch.watermark, or remove {node.name}"
            yield Diagnostic("FG406", node.place, message, help)


def check_leaves(graph: Graph) -> Iterator[Diagnostic]:
    """FG406: what is read once a leaf is read after the hop that says how many leaves there are."""
    if size_of("leaf", graph.dims, "max") <= 1:
        return
    for node in graph.nodes.values():
        if node.kind != "trajectory" or node.spec.facts.kind == "fold" or graph.doubtful(node):
            continue
        for binding in node.bindings:
            source, writer = binding.source, graph.nodes[binding.producer]
            if source is None or not repeats(source, writer, binding.port, node):
                continue
            if not any(_gives_leaves(before) for before in graph.upstream(node)):
                message = f"{node.name} reads {binding.port.name} once a leaf, before any hop gives leaves"
                help = f"let {node.name} read the bounds of the leaves too, or a single {binding.port.name}"
                yield Diagnostic("FG406", binding.decl.place, message, help)
                break


def _gives_leaves(node: Node) -> bool:
    return node.kind == "trajectory" and any("leaf" in d.names for c in node.spec.columns for d in c.shape)
