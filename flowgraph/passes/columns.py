"""Who writes a column, as each hop sees it: the nearest hop at or before it that has one of that name."""

from __future__ import annotations

from flowgraph.ir.graph import Graph
from flowgraph.spec.ports import Port


class Columns:
    """An index of every column over the rows that flow, made before any binding is left out.

    A name is looked up for the whole graph at once, when it is first asked for: a graph has far fewer names than
    hops, and a search from each reader would make the cost of a long chain quadratic.
    """

    def __init__(self, graph: Graph) -> None:
        self.feeds: dict[str, list[str]] = {}
        self.followers: dict[str, dict[str, None]] = {name: {} for name in graph.nodes}
        self.holders: dict[str, dict[str, Port]] = {}
        self.seen: dict[str, dict[str, str]] = {}
        for node in graph.nodes.values():
            self.feeds[node.name] = [b.via for b in node.bindings if b.flows]
            for via in self.feeds[node.name]:
                self.followers[via][node.name] = None
            for column in node.spec.columns:
                self.holders.setdefault(column.name, {})[node.name] = column

    def writer(self, hop: str, name: str) -> tuple[str, Port] | None:
        """The hop that writes what is called `name` at `hop`, and its port; None when nothing at or before it does."""
        if name not in self.holders:
            return None
        if name not in self.seen:
            self.seen[name] = self._spread(name)
        writer = self.seen[name].get(hop)
        return None if writer is None else (writer, self.holders[name][writer])

    def _spread(self, name: str) -> dict[str, str]:
        """Hop → the nearest writer, breadth first from all of them; of equally near ones the first input decides."""
        writer = {hop: hop for hop in self.holders[name]}
        level = list(writer)
        while level:
            here = set(level)
            level = list(dict.fromkeys(f for hop in level for f in self.followers[hop] if f not in writer))
            for hop in level:
                writer[hop] = writer[next(via for via in self.feeds[hop] if via in here)]
        return writer
