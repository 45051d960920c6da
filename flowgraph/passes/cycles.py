"""The cycles of the ring that nothing delays, each cut at the edge that was meant to lead back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import msgspec

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.move import move
from flowgraph.spec.types import Version


class Cycle(msgspec.Struct):
    """hops: in order, the first again as the last; back: the inputs that close it."""

    hops: list[str]
    back: list[Binding]


def undelayed(graph: Graph) -> list[Cycle]:
    """Cycles without a delay. Events do not count: they never block; nor what a fold says of its own ledger.

    Only a sampled value can be delayed: rows and their columns are those of the firing.
    """
    edges: dict[tuple[str, str], list[Binding]] = {}
    for node in graph.nodes.values():
        for binding in node.bindings:
            delayed = binding.decl.delay and not binding.flows
            if binding.port.mode != "event" and not delayed and not _ledger(graph, binding):
                edges.setdefault((binding.via, node.name), []).append(binding)
    cycles = []
    at = {name: i for i, name in enumerate(graph.file.hops)}
    while (hops := _find(edges)) is not None:
        back = max(pairwise(hops), key=lambda edge: _backness(at, edge, edges[edge]))
        start = hops.index(back[1])
        cycles.append(Cycle([*hops[start:-1], *hops[:start], back[1]], edges.pop(back)))
    return cycles


def check_cycles(graph: Graph, cycles: list[Cycle]) -> Iterator[Diagnostic]:
    """FG401: every cycle of the ring has a seam that declares a delay, and it is one that can be delayed.

    It comes before columns are bound, because along a cycle they can't be found.
    """
    for node in graph.nodes.values():
        for binding in node.bindings:
            if binding.decl.delay and binding.flows:
                what = f"{node.name} reads {binding.port.name} as rows"
                message = f"{what}, and only a value that is sampled can be delayed"
                help = "remove delay:, or delay the version that the cycle leads back"
                yield Diagnostic("FG401", binding.decl.place, message, help)
            elif _is_own(graph, binding, node.name):
                message = f"{node.name} reads {binding.port.name} from itself"
                help = f"read {binding.port.name} from another hop; what {node.name} gave, its state can hold"
                yield Diagnostic("FG401", binding.decl.place, message, help)
    cut = {id(binding) for cycle in cycles for binding in cycle.back}
    for cycle in cycles:
        first = min(cycle.back, key=lambda b: b.decl.place)
        if not any(b.decl.delay for b in cycle.back):
            message = f"the cycle {' → '.join(cycle.hops)} has no delay"
            lag = ", max_lag: 0" if first.port.dtype == Version.__name__ else ""
            help = f"write the back edge as {first.port.name}: {{from: {first.decl.ref}, delay: 1{lag}}}"
            if first.flows:
                help = _forward(graph, graph.nodes[cycle.hops[0]], first, cut)
            yield Diagnostic("FG401", first.decl.place, message, help)


def _forward(graph: Graph, reader: Node, back: Binding, cut: set[int]) -> str:
    """What to do about rows, or a column of them, that lead back, which no delay lets them do."""
    port, name = back.port.name, back.decl.ref.partition(".")[2] or back.port.name
    if back.port.kind != "rows":
        for hop in _before(graph, reader, cut):
            if any(c.name == name for at in (hop, *_before(graph, hop, cut)) for c in at.spec.columns):
                ref = hop.name if name == port else f"{hop.name}.{name}"
                return f"only a version leads back; read it before {reader.name}: {port}: {ref}"
        writer = next((n for n in graph.nodes.values() if n is not reader and n.column(name)), None)
        if reader.spec.facts.collect and writer is not None:
            return move(graph, writer, reader)
    return f"only a version leads back; read {port} from a hop before {reader.name}"


def _before(graph: Graph, node: Node, cut: set[int]) -> Iterator[Node]:
    """The hops whose rows reach `node` but by an edge that was cut, nearest first."""
    seen, queue = {node.name}, deque([node])
    while queue:
        for binding in queue.popleft().bindings:
            if binding.via not in seen and binding.flows and id(binding) not in cut:
                seen.add(binding.via)
                queue.append(graph.nodes[binding.via])
                yield graph.nodes[binding.via]


def _is_own(graph: Graph, binding: Binding, reader: str) -> bool:
    """What a hop gives and would fire on at once, for ever: its own events, and a fold's own values."""
    fires = binding.port.mode == "event" or graph.nodes[reader].spec.facts.kind == "fold"
    return binding.via == reader and fires and not binding.flows


def _ledger(graph: Graph, binding: Binding) -> bool:
    """A fold's view of its own ledger (free capacity, rows in flight) is read at once and needs no delay."""
    return binding.port.kind == "value" and graph.nodes[binding.producer].spec.facts.kind == "fold"


def _find(edges: dict[tuple[str, str], list[Binding]]) -> list[str] | None:
    order: TopologicalSorter[str] = TopologicalSorter()
    for writer, reader in edges:
        order.add(reader, writer)
    try:
        order.prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def _backness(at: dict[str, int], edge: tuple[str, str], bindings: list[Binding]) -> tuple[bool, int]:
    """Which edge was meant to lead back: one that samples a value, else the one that leads furthest up in the file."""
    samples = any(b.port.mode == "latest" and b.port.kind == "value" for b in bindings)
    return samples, at[edge[0]] - at[edge[1]]
