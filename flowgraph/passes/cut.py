"""Where the hops that nobody placed would cost least: a minimum cut over the bytes of the seams between owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.companions import row_bytes
from flowgraph.passes.sizes import rows_per_step

if TYPE_CHECKING:
    import networkx as nx

DRIVER = "driver"


class Suggestion(msgspec.Struct, frozen=True):
    """now, better: the owner that a hop has, and the one that it would cost least with."""

    hop: str
    now: str
    better: str


class Placement(msgspec.Struct, frozen=True):
    """hops: every one that nobody placed; before, after: mean bytes a step that cross between processes."""

    graph: str
    hops: tuple[Suggestion, ...]
    before: float
    after: float


def placement(graph: Graph) -> Placement:
    """Owners for the free hops of a rewritten graph, by minimum cut.

    The driver is no choice: it decides, and must not wait for a hop. Between two owners the cut is the best there is;
    between more, each owner is cut off from the others in turn (Dahlhaus et al. 1994: at most 2 − 2/k of the best), and
    then single hops move while that helps.
    """
    free = [n.name for n in graph.nodes.values() if n.free and n.spec.facts.kind != "fold"]
    edges = _edges(graph)
    owners = {n.name: n.owner for n in graph.nodes.values()}
    better = {**owners}
    for part in _parts(free, edges):
        better |= _cut(part, edges, owners)
    made = tuple(Suggestion(name, owners[name], better[name]) for name in free)
    return Placement(graph.file.name, made, _crossing(edges, owners), _crossing(edges, better))


Edges = dict[tuple[str, str], float]


def _edges(graph: Graph) -> Edges:
    """(writer, reader) → mean bytes a step that the reader reads of the writer."""
    edges: Edges = {}
    for reader, binding in graph.columns():
        writer = graph.nodes[binding.producer]
        if writer is not reader:
            key = writer.name, reader.name
            edges[key] = edges.get(key, 0.0) + _bytes(graph, writer, reader, binding)
    return edges


def _bytes(graph: Graph, writer: Node, reader: Node, binding: Binding) -> float:
    assert binding.source is not None
    if binding.source.kind == "tensors" or binding.derived:
        return 0.0  # its writer and its reader hold a learner and an engine, and so are placed
    kind = writer.kind if binding.once or writer.kind == reader.kind else "trajectory"
    return row_bytes(graph, writer, binding.source) * rows_per_step(kind, graph.dims, "mean")


def _crossing(edges: Edges, owners: Mapping[str, str]) -> float:
    return sum(n for (a, b), n in edges.items() if owners[a] != owners[b])


def _parts(free: list[str], edges: Edges) -> list[set[str]]:
    """Free hops that read each other, directly or through free ones."""
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(free)
    graph.add_edges_from((a, b) for a, b in edges if a in graph and b in graph)
    return [set(part) for part in nx.connected_components(graph)]


def _cut(part: set[str], edges: Edges, owners: Mapping[str, str]) -> dict[str, str]:
    """An owner for every hop of one part."""
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph()
    terminals: list[str] = []
    for (a, b), n in edges.items():
        ends = [one if one in part else f"@{owners[one]}" for one in (a, b)]
        if part.isdisjoint((a, b)) or f"@{DRIVER}" in ends:
            continue
        terminals += [end for end in ends if end.startswith("@") and end not in terminals]
        before = graph.get_edge_data(*ends, {"capacity": 0.0})["capacity"]
        graph.add_edge(*ends, capacity=before + n)
    if len(terminals) < 2:
        return {one: terminals[0][1:] if terminals else owners[one] for one in part}
    sides = _sides(graph, terminals)
    return _improved({one: sides.get(one, terminals[0])[1:] for one in part}, graph, terminals)


def _sides(graph: nx.Graph[str], terminals: list[str]) -> dict[str, str]:
    """Hop → the terminal on whose side it lies; what none cuts off goes with the one that is dearest to cut off."""
    import networkx as nx

    cuts = []
    for terminal in terminals:
        others = graph.copy()
        for other in terminals:
            if other != terminal:
                others.add_edge(other, "@others", capacity=float("inf"))
        value, (near, _) = nx.minimum_cut(others, terminal, "@others")
        cuts.append((value, terminal, near))
    cuts.sort(key=lambda c: (c[0], c[1]))
    dearest = cuts.pop()[1]
    sides = dict.fromkeys(graph, dearest)
    for _, terminal, near in reversed(cuts):
        sides |= dict.fromkeys(near, terminal)
    return sides


def _improved(at: dict[str, str], graph: nx.Graph[str], terminals: list[str]) -> dict[str, str]:
    """Move single hops to the owner that they exchange most with, until none gains."""
    for _ in at:
        moved = False
        for one in sorted(at):
            weight = dict.fromkeys((t[1:] for t in terminals), 0.0)
            for other in graph[one]:
                owner = at[other] if other in at else other[1:]
                weight[owner] += graph[one][other]["capacity"]
            best = max(weight, key=lambda owner: weight[owner])
            if weight[best] > weight[at[one]] + 1e-9:
                at[one], moved = best, True
        if not moved:
            break
    return at
