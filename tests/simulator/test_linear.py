"""What a simulation costs, in calls of functions: as many a trajectory, however many engines and trajectories."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import flowgraph
from flowgraph.runtime.rows import Record
from flowgraph.simulator.engines import Engine, Request
from flowgraph.simulator.ring import Ring


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


def test_all_memory_of_a_simulation_is_free_when_it_is_over() -> None:
    """Without the garbage collector, for which many thousand trajectories are much to look through."""
    plan = flowgraph.compile("graphs/quickstart.yaml", {"hops.dispatch.in.version.max_lag": 3})
    gc.collect()
    gc.disable()
    try:
        done = flowgraph.simulate(plan, steps=4, warmup=0, engines=2, slots=4, train_seconds=1.0)
        left = [one for one in gc.get_objects() if type(one) in (Ring, Engine, Request, Record)]
    finally:
        gc.enable()
    assert done.ledger.in_flight > 0
    assert not left
