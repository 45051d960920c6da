"""Where the hops that nobody placed are, and where they would cost least, as a table."""

from __future__ import annotations

import msgspec

from flowgraph.passes.cut import Placement
from flowgraph.spec.units import size_text


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
    moves = [one for one in found.hops if one.now != one.better]
    if moves:
        saved = size_text(found.before - found.after)
        sets = " ".join(f"--set hops.{one.hop}.owner={one.better}" for one in moves)
        lines.append(f"saves {saved} a step: {sets}")
    return "\n".join(lines) + "\n"


def _pair(before: float, after: float) -> str:
    a, b = size_text(before), size_text(after)
    return a if a == b else f"{a} → {b}"


def to_json(found: Placement) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1)
