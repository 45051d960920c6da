"""Whose an element is: which of the rows that a firing gathered, told by the bounds that the hop reads or gives."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowgraph.errors import PromiseBroken, RunError
from flowgraph.plan.plan import Hop, Plan


def member_of(error: RunError, plan: Plan, hop: Hop, env: Mapping[str, Any], leaves: Sequence[int]) -> int:
    """The row, counted among those gathered, whose element breaks a promise; -1 for what can't be told, or is none.

    env: what the hop read and gave, by port; leaves: of each gathered row
    """
    if not isinstance(error, PromiseBroken) or error.at is None:
        return -1
    dim, at = error.at
    if dim == "trajectory":
        return at
    leaf = at if dim == "leaf" else _leaf(dim, at, plan, hop, env)
    ends = list(itertools.accumulate(leaves))
    return next((i for i, end in enumerate(ends) if 0 <= leaf < end), -1)


def _leaf(dim: str, at: int, plan: Plan, hop: Hop, env: Mapping[str, Any]) -> int:
    """The leaf in which element `at` along a dim lies, by bounds that end where the dim does; -1 without any."""
    if dim == "leaf+1":
        return max(0, at - 1)
    shapes = {r.port: plan.hops[r.producer].column(r.column).shape for r in hop.reads}
    shapes |= {c.name: c.shape for c in hop.columns}
    sizes = {len(env[port]) for port, shape in shapes.items() if shape[:1] == (dim,) and port in env}
    for port, shape in shapes.items():
        if shape == ("leaf+1",) and port in env and len(env[port]) and int(env[port][-1]) in sizes:
            return int(np.searchsorted(env[port], at, side="right")) - 1
    return -1
