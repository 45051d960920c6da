"""Where the hops that nobody placed are, where they would cost least, and what that really saves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from flowgraph.ir.graph import Graph
from flowgraph.passes.cut import cut
from flowgraph.passes.rewrite import rewrite
from flowgraph.plan.lower import lower
from flowgraph.plan.plan import Plan
from flowgraph.spec.units import size_text


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


def placement(graph: Graph, off: Collection[str] = ()) -> Placement:
    """Owners for the free hops of a graph as it is written. off: passes to leave out.

    The cut proposes and the compiled plan decides: owners change which hops fire as one, and with that what is read.
    """
    made = rewrite(graph, off)
    better = cut(made, fused="fuse" not in off)
    now = {name: made.nodes[name].owner for name in better}
    before = after = _between(lower(made))
    if better != now:
        after = _between(lower(rewrite(_placed(graph, better), off)))
    if after >= before:
        better, after = now, before
    hops = tuple(Suggestion(name, now[name], better[name]) for name in better)
    return Placement(graph.file.name, hops, before, after)


def _placed(graph: Graph, owners: Mapping[str, str]) -> Graph:
    nodes = {
        name: msgspec.structs.replace(graph.nodes[name], owner=o, free=False) for name, o in owners.items()
    }
    return graph.with_nodes(nodes)


def _between(plan: Plan) -> float:
    """Mean bytes a step that one process writes and another reads, without weights: those stay where they are."""
    return sum(
        f.mean_bytes
        for s in plan.seams
        for f in s.fields
        if plan.hops[f.producer].owner != plan.hops[s.reader].owner
        and plan.hops[f.producer].column(f.column).kind != "tensors"
    )


def render(found: Placement) -> str:
    """One line a free hop, then what the whole would save and how to have it."""
    if not found.hops:
        return f"{found.graph}: every hop has an owner, in the graph or in its decorator\n"
    wide = max(len(one.hop) for one in found.hops)
    lines = [f"{found.graph}: hops that nobody placed, by minimum cut over the bytes between processes"]
    for one in found.hops:
        to = "stays" if one.now == one.better else f"→ {one.better}"
        lines.append(f"  {one.hop:<{wide}}  {one.now}  {to}")
    lines.append(f"between processes, without weights: {_pair(found.before, found.after)} a step")
    if any(one.now != one.better for one in found.hops):
        # Those that stay are named too: unsaid, they would follow the hops that read them.
        sets = " ".join(f"--set hops.{one.hop}.owner={one.better}" for one in found.hops)
        lines.append(f"saves {size_text(found.before - found.after)} a step: {sets}")
    return "\n".join(lines) + "\n"


def _pair(before: float, after: float) -> str:
    a, b = size_text(before), size_text(after)
    return a if a == b else f"{a} → {b}"


def to_json(found: Placement) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1)
