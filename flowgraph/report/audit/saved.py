"""What each pass makes of each seam, by comparing the plans before and after it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flowgraph.plan.plan import Plan
from flowgraph.report.audit.rows import Saving

NOBODY = "nobody"  # the reader of what passes through the driver though nobody reads it
Ends = tuple[str, str]  # source, reader
Cost = tuple[float, float]  # mean bytes a step that are read, and that pass through the driver


def costs(plan: Plan) -> dict[Ends, Cost]:
    """Of every seam with payload."""
    found = {
        (s.source, s.reader): (s.mean_bytes, sum(f.driver[0] for f in s.fields))
        for s in plan.seams
        if s.fields
    }
    return found | {(hop, NOBODY): (0.0, mean) for hop, (mean, _) in plan.unread.items()}


def savings(stages: Sequence[tuple[str, Plan]]) -> dict[Ends, tuple[Saving, ...]]:
    """Seam → the passes that changed its bytes, in order. stages: as `plan.compile.plans` gives them."""
    made = [(name, costs(plan)) for name, plan in stages]
    out: dict[Ends, tuple[Saving, ...]] = {}
    for (_, before), (name, after) in itertools.pairwise(made):
        for ends in before | after:
            was, now = before.get(ends, (0.0, 0.0)), after.get(ends, (0.0, 0.0))
            if any(abs(x - y) > 0.5 for x, y in zip(was, now, strict=True)):
                out[ends] = (*out.get(ends, ()), Saving(name, was[0] - now[0], was[1] - now[1]))
    return out
