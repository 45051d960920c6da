"""fuse: hops of one owner that follow each other on the same rows fire as one, and hand values on without a seam.

A value that nobody outside reads is not written. Every value is still checked against its port.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping

import msgspec

from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.companions import closure
from flowgraph.passes.order import every, in_order, triggers
from flowgraph.passes.ranks import on_ranks
from flowgraph.spec.forms import ports_of


def fuse(graph: Graph) -> Graph:
    groups = _groups(graph)
    sizes = Counter(groups.values())
    changed = {
        name: msgspec.structs.replace(graph.nodes[name], group=head)
        for name, head in groups.items()
        if sizes[head] > 1
    }
    fused = graph.with_nodes(changed)
    return fused.with_nodes(_unwritten(fused))


def _groups(graph: Graph) -> dict[str, str]:
    """Hop → the first hop of its group, for every hop that may fire with others: where it fires, so do they."""
    before = triggers(graph)
    fires = every(graph)
    order = {name: i for i, name in enumerate(in_order(before))}
    head: dict[str, str] = {}
    for name in order:
        node = graph.nodes[name]
        if not may_fuse(node) or on_ranks(graph, node):
            continue
        head[name] = name
        for one in sorted(before[name], key=lambda other: -order[other]):
            first = head.get(one)
            if first is None or not _alike(graph.nodes[first], node) or fires[one] != fires[name]:
                continue
            # What comes earlier than the first of the group can't wait for any of it.
            outside = [o for o in before[name] if head.get(o) != first]
            if all(order[o] < order[first] for o in outside) and not _takes_tensors(node, first, head):
                head[name] = first
                break
    return head


def may_fuse(node: Node) -> bool:
    """A plain function on rows, one firing at a time, that publishes no version."""
    function = node.spec.function
    publishes = any(p.initial is not None for p in node.spec.outputs)
    return (
        node.spec.facts.kind != "fold"
        and node.kind is not None
        and not publishes
        and not inspect.iscoroutinefunction(function)
        and all(b.port.mode == "queue" for b in node.bindings)
    )


def _alike(first: Node, node: Node) -> bool:
    return first.owner == node.owner and first.kind == node.kind


def _takes_tensors(node: Node, first: str, head: Mapping[str, str]) -> bool:
    """Whether it reads a set of tensors of the group: those are read where they were written, once they are."""
    return any(b.port.kind == "tensors" and head.get(b.producer) == first for b in node.bindings)


def _unwritten(graph: Graph) -> dict[str, Node]:
    """Nodes with the columns taken out that only hops of the same group read, and no form takes to be undone."""
    inside = {
        (writer, column)
        for (writer, column), readers in graph.by_column().items()
        if graph.nodes[writer].group and all(r.group == graph.nodes[writer].group for r, _ in readers)
    }
    needed = {
        (at.name, port.name)
        for node in graph.nodes.values()
        for name, wire in node.wires.items()
        if wire.written and (node.name, name) not in inside
        for at, port in closure(graph, node, ports_of(wire.form))
    }
    changed: dict[str, Node] = {}
    for writer, column in sorted(inside - needed):
        node = changed.get(writer, graph.nodes[writer])
        wires = node.wires | {column: msgspec.structs.replace(node.wire(column), written=False)}
        changed[writer] = msgspec.structs.replace(node, wires=wires)
    return changed
