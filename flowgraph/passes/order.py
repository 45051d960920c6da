"""Which hops of a row come before which, and on how many rows each of them fires."""

from __future__ import annotations

import math
from collections.abc import Mapping
from graphlib import TopologicalSorter

from flowgraph.ir.graph import Graph, Node


def makes_rows(node: Node) -> bool:
    facts = node.spec.facts
    return bool(facts.source or facts.expand or facts.collect)


def triggers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Hop → the hops on the same rows that it follows or reads; every one must be done with a row first."""
    return {name: _trigger(graph, node) for name, node in graph.nodes.items()}


def _trigger(graph: Graph, node: Node) -> tuple[str, ...]:
    if node.spec.facts.kind == "fold":
        return ()
    names: list[str] = []
    for binding in node.bindings:
        for name in (binding.producer, binding.via):
            other = graph.nodes[name]
            gives_part = other.spec.facts.kind != "fold" or (other.kind == node.kind and makes_rows(other))
            if binding.port.mode == "queue" and other.kind == node.kind and gives_part and name not in names:
                names.append(name)
    return tuple(names)


def in_order(before: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Hops so that each comes after all that it waits for."""
    return list(TopologicalSorter(before).static_order())


def firings(graph: Graph, before: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Hop → it fires on each k-th row only: on none that a hop before it skips."""
    every: dict[str, int] = {}
    for name in in_order(before):
        node = graph.nodes[name]
        own = [b.decl.every for b in node.bindings if b.port.mode == "queue"]
        fold = node.spec.facts.kind == "fold"
        every[name] = 1 if fold else math.lcm(*own, *(every[one] for one in before[name]))
    return every
