"""defer: payload goes from its writer's memory to its reader, and only a descriptor passes through the driver."""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Graph


def defer(graph: Graph) -> Graph:
    relayed = [n for n in graph.nodes.values() if n.relayed]
    return graph.with_nodes({n.name: msgspec.structs.replace(n, relayed=False) for n in relayed})
