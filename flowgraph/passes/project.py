"""project: a column that nobody reads is not written."""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Graph, Node
from flowgraph.spec.forms import Wire


def project(graph: Graph) -> Graph:
    read = graph.by_column()

    def unread(node: Node) -> dict[str, Wire]:
        names = [c.name for c in node.spec.columns if (node.name, c.name) not in read]
        return {name: msgspec.structs.replace(node.wire(name), written=False) for name in names}

    return graph.rewired(unread)
