"""Where the hops that nobody placed would cost least: a minimum cut over what crosses between owners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.companions import row_bytes
from flowgraph.passes.fuse import may_fuse
from flowgraph.passes.ranks import on_ranks
from flowgraph.passes.sizes import rows_per_step

if TYPE_CHECKING:
    import networkx as nx

DRIVER = "driver"
Owners = Mapping[str, str]


class Net(msgspec.Struct, frozen=True):
    """One column and hops that read it: nbytes a step go to each owner that reads it and did not write it."""

    writer: str
    readers: frozenset[str]
    nbytes: float


def cut(graph: Graph, *, fused: bool = True) -> dict[str, str]:
    """Hop → owner, for every hop of a rewritten graph that nobody placed. fused: hops that may fire as one read once.

    The driver is no choice: it decides, and must not wait for a hop. Between two owners the cut is the best there is;
    between more, each owner is cut off from the others in turn, and then single hops move while that helps.
    """
    free = {n.name: n.owner for n in graph.nodes.values() if n.free and n.spec.facts.kind != "fold"}
    made = nets(graph, fused=fused)
    owners = {n.name: n.owner for n in graph.nodes.values()}
    better = dict(owners)
    for part in _parts(free, made):
        own = [net for net in made if net.writer in part or not part.isdisjoint(net.readers)]
        moved = _cut(part, own, owners)
        if crossing(own, {**owners, **moved}) < crossing(own, owners):
            better |= moved
    return {name: better[name] for name in free}


def nets(graph: Graph, *, fused: bool = True) -> list[Net]:
    """What every hop reads of another. Weights are left out: their writer and their reader are placed."""
    found: dict[tuple[str, ...], Net] = {}
    for reader, binding in graph.columns():
        writer = graph.nodes[binding.producer]
        assert binding.source is not None
        if writer is reader or binding.source.kind == "tensors" or binding.derived:
            continue
        shares = (
            (reader.kind or "",)
            if fused and may_fuse(reader) and not on_ranks(graph, reader)
            else ("", reader.name)
        )
        key = writer.name, binding.source.name, *shares
        other = found.get(key, Net(writer.name, frozenset(), 0.0))
        nbytes = max(other.nbytes, _bytes(graph, writer, reader, binding))
        found[key] = Net(writer.name, other.readers | {reader.name}, nbytes)
    return list(found.values())


def _bytes(graph: Graph, writer: Node, reader: Node, binding: Binding) -> float:
    assert binding.source is not None
    kind = writer.kind if binding.once or writer.kind == reader.kind else "trajectory"
    return row_bytes(graph, writer, binding.source) * rows_per_step(kind, graph.dims, "mean")


def crossing(made: Iterable[Net], owners: Owners) -> float:
    """Mean bytes a step that one process writes and another reads."""
    return sum(net.nbytes * len({owners[r] for r in net.readers} - {owners[net.writer]}) for net in made)


def _parts(free: Iterable[str], made: list[Net]) -> list[set[str]]:
    """Free hops that share a net, directly or through other free ones."""
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(free)
    for net in made:
        ends = [one for one in (net.writer, *sorted(net.readers)) if one in graph]
        nx.add_path(graph, ends)
    return [set(part) for part in nx.connected_components(graph)]


def _cut(part: set[str], made: list[Net], owners: Owners) -> dict[str, str]:
    """An owner for every hop of one part."""
    placed = [owners[one] for net in made for one in (net.writer, *sorted(net.readers)) if one not in part]
    choices = [owner for owner in dict.fromkeys(placed) if owner != DRIVER]
    if not choices:  # nobody holds them anywhere, so they cost nothing together
        choices = sorted({owners[one] for one in part} - {DRIVER})
        return dict.fromkeys(part, choices[0]) if choices else {}
    if len(choices) < 2:
        return dict.fromkeys(part, choices[0])
    at = _cut_off(part, made, owners, choices)
    return at if len(choices) == 2 else _improved(at, made, owners, choices)


def _cut_off(part: set[str], made: list[Net], owners: Owners, choices: list[str]) -> dict[str, str]:
    """Hop → the owner on whose side it lies; what none cuts off goes to the one that is dearest to cut off."""
    import networkx as nx

    cuts = []
    for owner in choices if len(choices) > 2 else choices[:1]:
        value, (near, _) = nx.minimum_cut(_network(part, made, owners, owner), "near", "far")
        cuts.append((value, owner, {one for one in part if f"hop {one}" in near}))
    cuts.sort(key=lambda c: (c[0], c[1]))
    rest = choices[1] if len(choices) == 2 else cuts.pop()[1]
    at = dict.fromkeys(part, rest)
    for _, owner, near in reversed(cuts):
        at |= dict.fromkeys(near, owner)
    return at


def _network(part: set[str], made: list[Net], owners: Owners, owner: str) -> nx.DiGraph[str]:
    """A flow network in which a cut costs what crosses, with all hops of `owner` near and those of others far.

    A net costs its bytes once however many of its readers are on the other side, hence a node between them and the
    writer. What the driver wrote crosses anyway, and once more when its readers are on both sides.
    """
    import networkx as nx

    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(["near", "far"])
    for i, net in enumerate(made):
        end = {one: _end(one, part, owners, owner) for one in (net.writer, *net.readers)}
        readers = sorted({end[one] for one in net.readers} - {DRIVER})
        out, back = f"out {i}", f"back {i}"
        if end[net.writer] == DRIVER:
            graph.add_edge(back, out, capacity=net.nbytes)
        else:
            graph.add_edge(end[net.writer], out, capacity=net.nbytes)
            graph.add_edge(back, end[net.writer], capacity=net.nbytes)
        graph.add_edges_from((out, one) for one in readers)  # without a capacity: never cut
        graph.add_edges_from((one, back) for one in readers)
    return graph


def _end(one: str, part: set[str], owners: Owners, owner: str) -> str:
    if one in part:
        return f"hop {one}"
    return DRIVER if owners[one] == DRIVER else "near" if owners[one] == owner else "far"


def _improved(at: dict[str, str], made: list[Net], owners: Owners, choices: list[str]) -> dict[str, str]:
    """Move single hops to the owner where they cost least, until none gains."""
    best = crossing(made, {**owners, **at})
    moved = True
    while moved:
        moved = False
        for one in sorted(at):
            costs = {owner: crossing(made, {**owners, **at, one: owner}) for owner in choices}
            owner = min(choices, key=lambda owner: costs[owner])
            if costs[owner] < best - 1e-9:
                at, best, moved = {**at, one: owner}, costs[owner], True
    return at
