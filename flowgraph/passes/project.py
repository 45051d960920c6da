"""project: a column that nobody reads is not written."""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Graph


def project(graph: Graph) -> Graph:
    read = graph.by_column()
    changed = {}
    for node in graph.nodes.values():
        unread = [c.name for c in node.spec.columns if (node.name, c.name) not in read]
        if unread:
            wires = node.wires | {
                name: msgspec.structs.replace(node.wire(name), written=False) for name in unread
            }
            changed[node.name] = msgspec.structs.replace(node, wires=wires)
    return graph.with_nodes(changed)
