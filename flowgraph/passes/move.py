"""What to do about a column that is written too late: read it where it is, or move its writer before the rows wait."""

from __future__ import annotations

from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.order import makes_rows


def too_late(graph: Graph, node: Node, port: str, name: str, after: Node) -> str | None:
    """One fix, when a hop gives `name` but only after `after`; None when there is no such hop."""
    for writer in graph.nodes.values():
        if all(column.name != name for column in writer.spec.columns) or writer is node:
            continue
        before = list(graph.upstream(writer))
        if node in before and node.spec.facts.collect:
            return f"{writer.name} gives {name}, but only after {node.name}; {move(graph, writer, node)}"
        if after in before and node not in before:
            return f"{writer.name} gives {name}, but only after {after.name}; read it there: {port}: {writer.name}"
    return None


def move(graph: Graph, writer: Node, batch: Node) -> str:
    """How a hop that works on what a batch chose is moved to where the rows of the batch come from."""
    rows = next((b for b in batch.bindings if b.port.kind == "rows" and b.flows), None)
    if rows is None:
        return f"move {writer.name} before {batch.name}"
    waits, via, port = batch, rows.via, rows.port.name
    pool = graph.nodes[rows.via]
    feed = next((b for b in pool.bindings if b.port.kind == "rows" and b.port.mode == "queue"), None)
    if pool.spec.facts.kind == "fold" and not makes_rows(pool) and feed is not None:
        waits, via, port = pool, feed.via, feed.port.name
    late = [b.via == batch.name or batch in graph.upstream(graph.nodes[b.via]) for b in writer.bindings]
    pairs = zip(writer.bindings, late, strict=True)
    reads = ", ".join(f"{b.port.name}: {via if moved else b.decl.ref}" for b, moved in pairs)
    wires = f"{writer.name} in: {{{reads}}}, {waits.name} in: {{{port}: {writer.name}}}"
    return f"move {writer.name} before {waits.name}: {wires}"
