"""What a simulation costs, in calls of functions: as many a trajectory, however many engines and trajectories."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import flowgraph


def _calls(scale: int) -> float:
    """Calls a trajectory, with this many times 4 engines and 64 trajectories in flight."""
    overrides = {
        "dims.group": 4 * scale,
        "dims.sample": 8,
        "dims.response": {"mean": 200, "max": 4096},
        "hops.dispatch.in.version.max_lag": 3,
        "hops.dispatch.with": {"target": 64 * scale},
    }
    plan = flowgraph.compile("graphs/quickstart.yaml", overrides)
    count = 0

    def called(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        done = flowgraph.simulate(
            plan,
            steps=12,
            engines=4 * scale,
            slots=32,
            lengths="lognormal:200,0.5",
            train_seconds=0.1,
            warmup=0,
        )
    finally:
        sys.setprofile(None)
    assert done.in_flight > 40 * scale
    return count / done.ledger.dispatched


def test_calls_a_trajectory_do_not_grow_with_engines_nor_with_trajectories_in_flight() -> None:
    few, many = _calls(2), _calls(8)
    assert many < 1.1 * few, f"{few:.0f} calls a trajectory, and {many:.0f} with four times as many in flight"
