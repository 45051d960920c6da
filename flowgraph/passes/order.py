"""Which hops of a row come before which, and on which of its rows each of them fires."""

from __future__ import annotations

import math
from collections.abc import Mapping
from graphlib import TopologicalSorter

from flowgraph.ir.graph import Binding, Graph, Node


def makes_rows(node: Node) -> bool:
    facts = node.spec.facts
    return bool(facts.source or facts.expand or facts.collect)


def trigger(graph: Graph, node: Node) -> tuple[str, ...]:
    """For a hop on rows: the hops of the same kind that it follows or reads; every one must be there first."""
    if node.spec.facts.kind == "fold":
        return ()
    names: dict[str, None] = {}
    for binding in node.bindings:
        for name in (binding.producer, binding.via):
            other = graph.nodes[name]
            gives_part = other.spec.facts.kind != "fold" or (other.kind == node.kind and makes_rows(other))
            if binding.port.mode == "queue" and other.kind == node.kind and gives_part:
                names[name] = None
    return tuple(names)


def triggers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Hop → its trigger, for every hop."""
    return {name: trigger(graph, node) for name, node in graph.nodes.items()}


def in_order(before: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Hops so that each comes after all that it waits for. It does not depend on the order of the file."""
    sorter = TopologicalSorter(before)
    sorter.prepare()
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        sorter.done(*ready)
        order += ready
    return order


def every(graph: Graph) -> dict[str, int]:
    """Hop → which rows it fires on, each k-th: none that a hop before it skips. The triggers have no cycle."""
    known: dict[str, int] = {}
    for name in graph.nodes:
        waiting = [name] if name not in known else []
        while waiting:
            node = graph.nodes[waiting[-1]]
            before = trigger(graph, node)
            missing = [other for other in before if other not in known]
            if missing:
                waiting += missing
                continue
            own = [b.decl.every for b in node.bindings if b.port.mode == "queue"]
            fires = 1 if node.spec.facts.kind == "fold" else math.lcm(*own, *(known[n] for n in before))
            known[waiting.pop()] = fires
    return known


def thinned(graph: Graph, node: Node) -> Binding | None:
    """The input that makes a hop skip rows: its own, or that of a hop before it."""
    for at in (node, *graph.upstream(node)):
        for binding in at.bindings:
            skips = binding.decl.every > 1 and binding.port.mode == "queue"
            if skips and at.kind == node.kind:
                return binding
    return None
