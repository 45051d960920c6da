"""Ranks: the processes among which an owner's work is split, and which part of a column each of them reads.

`ranks: {trajectory: 16, layers: 8}` is 128 processes. Each reads a sixteenth of the trajectories of a column, and an
eighth of its layers where it has any; what an axis does not split, every rank along it reads whole.

Those of a learner that are split by trajectory alone run: the hops that use the learner fire on every rank, and all
others of the owner on the first. What else can be written here is priced only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowgraph.errors import Diagnostic, Place
from flowgraph.ir.graph import Graph, Node, is_offsets
from flowgraph.models import resolve
from flowgraph.passes.context import too_long
from flowgraph.passes.sizes import dim_values
from flowgraph.spec.ports import Port
from flowgraph.spec.reader import near
from flowgraph.spec.types import LastToken, TiledOver

UNWEIGHTED = ("priced", "config", "class")  # models of which only the numbers are known
ROWS = ("trajectory", "leaf", "token")  # along each of these the rows of a batch lie


def splits(axis: str, port: Port, writer: Node) -> bool:
    """Whether an axis splits a column. A set of tensors is split by how a learner lays it out, not by dims; texts and
    JSON of a whole batch lie in one piece.
    """
    if port.kind == "tensors":
        return False
    names = names_of(port)
    if axis in ("trajectory", "leaf"):
        each = writer.kind in ("group", "trajectory")
        return each or (port.kind == "array" and not names.isdisjoint(ROWS))
    return axis in names


def names_of(port: Port) -> set[str]:
    """The dims that a port's shape is made of."""
    return {name for dim in port.shape for name in dim.names}


def share(graph: Graph, node: Node, port: Port, writer: Node) -> tuple[int, tuple[tuple[str, int], ...]]:
    """(how many processes read a part of a column, by which axes it is split) for a reader."""
    ranks = graph.owners[node.owner].ranks
    if processes(graph, node.owner) > 1 and not on_ranks(graph, node):
        return 1, ()
    return math.prod(ranks.values()), tuple((a, n) for a, n in ranks.items() if splits(a, port, writer))


def processes(graph: Graph, owner: str) -> int:
    """How many processes an owner runs as: several share the trajectories of a learner's batch, and nothing else."""
    one = graph.owners[owner]
    return one.ranks["trajectory"] if one.learner is not None and list(one.ranks) == ["trajectory"] else 1


def on_ranks(graph: Graph, node: Node) -> bool:
    """Whether a hop fires on every process of its owner, each with its own trajectories."""
    return node.spec.facts.uses == "learner" and processes(graph, node.owner) > 1


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
                yield Diagnostic("FG106", place, message, f"write {most:g}, or less")
            if not any(splits(axis, port, writer) for port, writer in read):
                known = sorted(
                    {n for port, _ in read for dim in port.shape for n in dim.names} | {"trajectory"}
                )
                message = f"owners.{name}.ranks.{axis} splits nothing that {name} reads"
                help = f"{near(axis, known)}name a dim of what it reads: {', '.join(known)}"
                yield Diagnostic("FG104", place, message, help)


# --- what can be priced only -------------------------------------------------------------------------------------


def unrunnable(graph: Graph) -> list[Diagnostic]:
    """FG114: what can be priced, and is not there to run. The graph has no other findings."""
    return sorted((finding for _, finding in _missing(graph)), key=lambda d: d.place)


def priced_only(graph: Graph) -> list[str]:
    """The hops that are only described or that no ranks can share, and the owners with ranks that do not run or
    without weights: why a graph can't run.
    """
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
        elif on_ranks(graph, node) and (why := _unshared(graph, node)):
            count = processes(graph, node.owner)
            message = f"hop {node.name} {why}, and its learner is {count} processes"
            help = f"give {node.owner} one process, or the hop another owner"
            yield node.name, Diagnostic("FG114", graph.file.hops[node.name].use_place, message, help)
    for name, owner in graph.owners.items():
        decl = graph.file.owners[name]
        if owner.model is not None and resolve(owner.model).kind in UNWEIGHTED:
            message = f"the model of owner {name}, {owner.model}, is known by its numbers and has no weights"
            help = "name a hub id or a directory with weights to run it"
            yield name, Diagnostic("FG114", decl.place, message, help)
        count = math.prod(owner.ranks.values())
        if count > 1 and processes(graph, name) == 1:
            others = {axis: place for axis, place in decl.rank_places.items() if axis != "trajectory"}
            yield name, Diagnostic("FG114", *_unshareable(name, count, decl.rank_places, others))


def _unshareable(
    name: str, count: int, places: dict[str, Place], others: dict[str, Place]
) -> tuple[Place, str, str]:
    """Where, what and help of an owner whose ranks don't run. others: the axes that are not trajectory."""
    if others:
        axes = ", ".join(others)
        message = f"owner {name} splits its work by {axes} too, and only trajectories are shared out in a run"
        return next(iter(others.values())), message, f"leave {axes} out of ranks: of {name} to run it"
    message = f"owner {name} has {count:,} ranks, and no learner whose work they could share"
    return next(iter(places.values())), message, f"remove ranks: of {name} to run it"


def _unshared(graph: Graph, node: Node) -> str:
    """Why ranks can't share a hop's work; "" when they can."""
    if node.kind != "step":
        return f"works on {node.kind} rows" if node.kind else "fires on a value"
    rows = [port for port in node.spec.columns if not names_of(port).isdisjoint(ROWS)]
    for port in rows:
        if port.kind != "array" or not _cuttable(port):
            return f"gives {port.name} as {port}, of which no whole can be made from every rank's part"
    if rows and any(port.kind == "tensors" for port in node.spec.columns):
        return f"gives {rows[0].name}, a value for each row, beside a set of tensors"
    for binding in node.bindings:
        source = binding.source
        if not binding.is_column or source is None or graph.nodes[binding.producer].kind != "step":
            continue
        odd = [f.dim for f in source.facts if isinstance(f, LastToken | TiledOver) and f.dim not in ROWS]
        odd += [] if _cuttable(source) else [str(source)]
        if odd:
            return f"reads {source.name} of {binding.producer} along {odd[0]}, which can't be cut"
    return ""


def _cuttable(port: Port) -> bool:
    """Whether one dim at the most is that of rows, or of their bounds, and is made of nothing else."""
    dims = [dim for dim in port.shape if not dim.names.isdisjoint(ROWS)]
    return len(dims) < 2 and all(str(d) in ROWS or (is_offsets(d) and d.names <= set(ROWS)) for d in dims)
