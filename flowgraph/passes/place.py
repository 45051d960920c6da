"""place: a hop that nobody placed moves to where its output is read; a process maps only the memory that it reads."""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.order import in_order


def place(graph: Graph) -> Graph:
    read = graph.read_by()
    owners = {name: node.owner for name, node in graph.nodes.items()}
    before = {n.name: tuple(b.producer for b in n.bindings if b.is_column) for n in graph.nodes.values()}
    # From the last hop to the first, so that a chain of free hops follows the hop that reads its end.
    for name in reversed(in_order(before)):
        node = graph.nodes[name]
        readers = (owners[reader.name] for reader, binding in read[name] if not binding.carries_rows)
        owner = next((one for one in readers if one != "driver"), None)
        movable = node.free and node.spec.facts.kind != "fold"
        if movable and owner is not None and _same_tokenizer(graph, node, owner):
            owners[name] = owner
    moved = {
        name: msgspec.structs.replace(node, owner=owners[name])
        for name, node in graph.nodes.items()
        if owners[name] != node.owner
    }
    return msgspec.structs.replace(graph.with_nodes(moved), mapped=True)


def _same_tokenizer(graph: Graph, node: Node, owner: str) -> bool:
    """Whether a hop that takes a tokenizer gets the same one there."""
    takes = any(param.origin == "resource" and param.detail == "tokenizer" for param in node.spec.params)
    return not takes or graph.tokenizer_model(owner) == graph.tokenizer_model(node.owner)
