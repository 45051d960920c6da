"""place: a hop that nobody placed moves to where its output is read; a process maps only the memory that it reads."""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Graph, Node


def place(graph: Graph) -> Graph:
    readers: dict[str, list[str]] = {}
    changed = {}
    # From the last hop to the first, so that a chain of free hops follows the hop that reads its end.
    for node in reversed(list(graph.nodes.values())):
        workers = [owner for owner in readers.get(node.name, ()) if owner != "driver"]
        if (
            node.free
            and workers
            and node.spec.facts.kind != "fold"
            and _same_tokenizer(graph, node, workers[-1])
        ):
            node = changed[node.name] = msgspec.structs.replace(node, owner=workers[-1])
        for binding in node.bindings:
            if not binding.carries_rows:
                readers.setdefault(binding.producer, []).append(node.owner)
    return msgspec.structs.replace(graph.with_nodes(changed), mapped=True)


def _same_tokenizer(graph: Graph, node: Node, owner: str) -> bool:
    """Whether a hop that takes a tokenizer gets the same one there."""
    takes = any(param.origin == "resource" and param.detail == "tokenizer" for param in node.spec.params)
    return not takes or graph.tokenizer_model(owner) == graph.tokenizer_model(node.owner)
