"""What a form takes to be undone: the writer's own ports, as the reader can get at them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from flowgraph.ir.graph import Graph, Node, is_offsets
from flowgraph.passes.sizes import rows_per_step, stored_bytes
from flowgraph.spec.forms import Wire, ports_of
from flowgraph.spec.ports import Port
from flowgraph.spec.types import LIFETIMES, Lifetime, Mask

# How long a value must live at least, for a reader on later rows than its own.
NEEDED: dict[str | None, Lifetime] = {"trajectory": "trajectory", "step": "consumed"}


def written_at(graph: Graph, node: Node, port: str) -> tuple[Node, Port] | None:
    """The hop and column where the value of a writer's port lies: its own output, or what it reads."""
    own = node.column(port)
    if own is not None:
        return node, own
    binding = node.binding(port)
    if binding is None or binding.source is None or not binding.is_column:
        return None
    return graph.nodes[binding.producer], binding.source


def tells(port: Port) -> bool:
    """Whether it says where rows begin or what is valid. It takes no companion itself, so that none can take another
    that takes it.
    """
    return any(isinstance(f, Mask) for f in port.facts) or any(is_offsets(dim) for dim in port.shape)


def closure(graph: Graph, node: Node, ports: Iterable[str]) -> Iterator[tuple[Node, Port]]:
    """Where every one of the ports lies, and what those take in their turn."""
    for port in ports:
        at = written_at(graph, node, port)
        if at is not None:
            yield at
            yield from closure(graph, at[0], ports_of(at[0].wire(at[1].name).form))


def reachable(graph: Graph, node: Node, ports: Iterable[str], reader: Node) -> bool:
    """Whether all that the ports take is written, and alive when `reader` fires."""
    if any(written_at(graph, node, port) is None for port in ports):
        return False
    return all(
        at.wire(port.name).written and outlives(at, reader) for at, port in closure(graph, node, ports)
    )


def outlives(writer: Node, reader: Node) -> bool:
    """Whether a value of `writer` is alive when `reader` reads it."""
    needed = life_needed(writer, reader)
    return needed is None or LIFETIMES.index(writer.spec.facts.lifetime) >= LIFETIMES.index(needed)


def life_needed(writer: Node, reader: Node) -> Lifetime | None:
    """How long a value of `writer` must live at least, for `reader` to find it; None for one on the same rows.

    A fold that is shown rows, told of them, or handed them by another fold, reads them after they may have been taken
    from every queue.
    """
    rows = [b for b in reader.bindings if b.port.kind == "rows"]
    later = [b for b in rows if b.port.mode != "queue" or (b.source is not None and b.source.handed)]
    shown = [b.port.row_kind for b in later]
    if reader.spec.facts.kind == "fold" and "trajectory" in shown and writer.kind == "trajectory":
        return "consumed"
    return NEEDED.get(reader.kind) if writer.kind != reader.kind else None


def extra_bytes(graph: Graph, node: Node, ports: Iterable[str], reader: Node) -> float:
    """Mean bytes a step that `reader` reads of the ports, where it does not read the same columns anyway."""
    own = {(b.producer, b.source.name) for b in reader.bindings if b.source is not None and not b.derived}
    total = 0.0
    for at, port in dict.fromkeys((at.name, port.name) for at, port in closure(graph, node, ports)):
        if (at, port) not in own:
            column = graph.nodes[at].column(port)
            assert column is not None
            kind = reader.kind if reader.kind == graph.nodes[at].kind else "trajectory"
            total += row_bytes(graph, graph.nodes[at], column) * rows_per_step(kind, graph.dims, "mean")
    return total


def pays(graph: Graph, node: Node, port: Port, wire: Wire, readers: Collection[Node]) -> bool:
    """Whether readers can undo a wire's form, and what is saved over all is more than what they read besides."""
    if not all(reachable(graph, node, ports_of(wire.form), reader) for reader in readers):
        return False
    each = row_bytes(graph, node, port) - stored_bytes(port, wire, node.kind, graph.dims, "mean")
    saved = 0.0
    for reader in readers:
        kind = reader.kind if reader.kind == node.kind else "trajectory"
        saved += each * rows_per_step(kind, graph.dims, "mean")
        saved -= extra_bytes(graph, node, ports_of(wire.form), reader)
    return saved > 0 if readers else each > 0


def row_bytes(graph: Graph, node: Node, port: Port) -> float:
    """Mean bytes of one row of a column as it lies now."""
    return stored_bytes(port, node.wire(port.name), node.kind, graph.dims, "mean")
