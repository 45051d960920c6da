"""Ranks: the processes among which an owner's work is split, and which part of a column each of them reads.

`ranks: {trajectory: 16, layers: 8}` is 128 processes. Each reads a sixteenth of the trajectories of a column, and an
eighth of its layers where it has any; what an axis does not split, every rank along it reads whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph, Node
from flowgraph.models import resolve
from flowgraph.passes.context import too_long
from flowgraph.passes.sizes import dim_values
from flowgraph.spec.ports import Port
from flowgraph.spec.reader import near

UNWEIGHTED = ("priced", "config", "class")  # models of which only the numbers are known
ROWS = ("trajectory", "leaf", "token")  # along each of these the rows of a batch lie


def splits(axis: str, port: Port, writer: Node) -> bool:
    """Whether an axis splits a column. A set of tensors is split by how a learner lays it out, not by dims."""
    if port.kind == "tensors":
        return False
    names = {name for dim in port.shape for name in dim.names}
    if axis in ("trajectory", "leaf"):
        return writer.kind == "trajectory" or not names.isdisjoint(ROWS)
    return axis in names


def share(graph: Graph, owner: str, port: Port, writer: Node) -> tuple[int, tuple[tuple[str, int], ...]]:
    """(how many processes read a part of a column, by which axes it is split) for a reader of this owner."""
    ranks = graph.owners[owner].ranks
    return math.prod(ranks.values()), tuple((a, n) for a, n in ranks.items() if splits(a, port, writer))


def check_ranks(graph: Graph) -> Iterator[Diagnostic]:
    """FG104: every axis splits something that the owner's hops read, into no more parts than there are."""
    if graph.broken or graph.file.partial & {"hops", "owners"}:
        return
    for name, owner in graph.owners.items():
        read = [
            (b.source, graph.nodes[b.producer])
            for node, b in graph.columns()
            if node.owner == name and b.source is not None
        ]
        for axis, parts in owner.ranks.items():
            place = graph.file.owners[name].rank_places[axis]
            most = dim_values("step", graph.dims, "max").get(axis)
            if most is not None and parts > most:
                message = f"owners.{name}.ranks.{axis} splits {most:g} of {axis} into {parts} parts"
                yield Diagnostic("FG106", place, message, f"write {axis}: {most:g}, or less")
            if not any(splits(axis, port, writer) for port, writer in read):
                known = sorted(
                    {n for port, _ in read for dim in port.shape for n in dim.names} | {"trajectory"}
                )
                message = f"owners.{name}.ranks.{axis} splits nothing that {name} reads"
                help = f"{near(axis, known)}name a dim of what it reads: {', '.join(known)}"
                yield Diagnostic("FG104", place, message, help)


def unrunnable(graph: Graph) -> list[Diagnostic]:
    """FG114: what can be priced, and is not there to run. The graph has no other findings."""
    return sorted((finding for _, finding in _missing(graph)), key=lambda d: d.place)


def priced_only(graph: Graph) -> list[str]:
    """The hops that are only described, and the owners with ranks or without weights: why a graph can't run."""
    return list(dict.fromkeys(name for name, _ in _missing(graph)))


def _missing(graph: Graph) -> Iterator[tuple[str, Diagnostic]]:
    """(hop or owner, what it lacks to be run)."""
    yield from too_long(graph)
    for node in graph.nodes.values():
        if who := node.spec.facts.described:
            place = graph.file.hops[node.name].use_place
            message = f"hop {node.name} ({node.spec.use}) only describes what {who} does, so it can't run"
            help = "audit, draw or explain this graph; to run one, use a hop with a body, such as those of hops.rollout"
            yield node.name, Diagnostic("FG114", place, message, help)
    for name, owner in graph.owners.items():
        decl = graph.file.owners[name]
        if owner.model is not None and resolve(owner.model).kind in UNWEIGHTED:
            message = f"the model of owner {name}, {owner.model}, is known by its numbers and has no weights"
            help = "name a hub id or a directory with weights to run it"
            yield name, Diagnostic("FG114", decl.place, message, help)
        if (count := math.prod(owner.ranks.values())) > 1:
            message = f"owner {name} has {count:,} ranks, and an owner runs as one process"
            help = f"remove ranks: of {name} to run it"
            yield name, Diagnostic("FG114", next(iter(decl.rank_places.values())), message, help)
