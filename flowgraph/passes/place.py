"""place: a hop that nobody placed moves to where its output is read; a process maps only the memory that it reads."""

from __future__ import annotations

from collections import Counter

import msgspec

from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.order import in_order


def place(graph: Graph) -> Graph:
    """A free hop goes to the owner that most of its readers have; of several the first by name."""
    owners = {name: node.owner for name, node in graph.nodes.items()}
    readers: dict[str, Counter[str]] = {name: Counter() for name in graph.nodes}
    before: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for node, binding in graph.columns():
        if binding.producer != node.name:
            before[node.name].append(binding.producer)
    # From the last reader to the first writer, so that a chain of free hops follows the hop that reads its end.
    for name in reversed(in_order({hop: tuple(writers) for hop, writers in before.items()})):
        node, found = graph.nodes[name], readers[name]
        if node.free and found and node.spec.facts.kind != "fold":
            most = min(found, key=lambda owner: (-found[owner], owner))
            owners[name] = most if _same_tokenizer(graph, node, most) else node.owner
        for writer in before[name] if owners[name] != "driver" else ():
            readers[writer][owners[name]] += 1
    moved = {
        n.name: msgspec.structs.replace(n, owner=owners[n.name])
        for n in graph.nodes.values()
        if n.owner != owners[n.name]
    }
    return msgspec.structs.replace(graph.with_nodes(moved), mapped=True)


def _same_tokenizer(graph: Graph, node: Node, owner: str) -> bool:
    """Whether a hop that takes a tokenizer gets the same one there."""
    takes = any(param.origin == "resource" and param.detail == "tokenizer" for param in node.spec.params)
    return not takes or graph.tokenizer_model(owner) == graph.tokenizer_model(node.owner)
