"""FG407: what a graph says of a seam or a queue means something there. Nothing is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Binding, Graph, Node


def check_said(graph: Graph) -> Iterator[Diagnostic]:
    for node in graph.nodes.values():
        for binding in node.bindings:
            yield from _delay(graph, node, binding)
            yield from _max_lag(node, binding)
        yield from _capacity(graph, node)


def _delay(graph: Graph, node: Node, binding: Binding) -> Iterator[Diagnostic]:
    """Only a sampled value of a hop that works can be late; rows that are delayed are FG401."""
    if not binding.decl.delay or binding.flows:
        return
    what = f"{node.name} delays its input {binding.port.name}"
    if binding.port.mode == "event":
        message, help = f"{what}, and an event is told at once", "remove delay:"
    elif graph.nodes[binding.producer].spec.facts.kind == "fold":
        message, help = f"{what}, and what a fold says of its ledger is read at once", "remove delay:"
    elif binding.decl.delay > 1:
        message = f"{what} by {binding.decl.delay}, and what is read is always the newest"
        help = "write delay: 1"
    else:
        return
    yield Diagnostic("FG407", binding.decl.place, message, help)


def _max_lag(node: Node, binding: Binding) -> Iterator[Diagnostic]:
    """A lag is counted in versions, so it is stated where one is read."""
    published = binding.source is not None and binding.source.initial is not None
    if binding.decl.max_lag is not None and not (binding.port.mode == "latest" and published):
        message = f"{node.name} states the max_lag of its input {binding.port.name}, and only a version lags"
        help = "state it where the version is read: version: {from: sync, delay: 1, max_lag: 0}"
        yield Diagnostic("FG407", binding.decl.place, message, help)


def _capacity(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    """Groups wait to be sampled and steps to be trained; trajectories are bounded by the room of their pool."""
    facts = node.spec.facts
    if node.capacity is None or facts.source or facts.collect:
        return
    decl = graph.file.hops[node.name]
    message = f"{node.name} has a capacity, and only a source and a batch make rows that wait in a queue"
    help = "remove capacity:; a buffer takes it under with:, a dispatcher has a target there"
    yield Diagnostic("FG407", decl.capacity_place or decl.place, message, help)
