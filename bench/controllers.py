"""What the controllers cost: 1,000 engines and 100,000 trajectories in flight, through the same folds as a real run.

    python bench/controllers.py [--runs 3]

A trajectory event is: one is dispatched, becomes ready, is consumed or dropped; three a trajectory. The whole is rows,
ledger, folds, engines, trainer and what is measured, on one core in processor time. Every run is timed twice, as it is
and with a clock around every call of a fold, less what reading the clock costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import flowgraph
from flowgraph.plan.plan import Plan
from flowgraph.simulator.ring import Ring
from flowgraph.simulator.run import endless
from flowgraph.simulator.settings import fit, make
from flowgraph.simulator.trace import LEVELS

ENGINES, SLOTS, GROUPS, SAMPLES, LAG = 1000, 128, 256, 16, 60
SETTINGS = {"engines": ENGINES, "slots": SLOTS, "lengths": "lognormal:2000,0.5", "train_seconds": 0.5}
IN_FLIGHT = LEVELS.index("in_flight")
STEPS = 50  # of 4,096 trajectories; after 30 of them as many as may be are in flight


class Clocked:
    """A fold's function, and the time that its calls took."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step, self.calls, self.seconds = step, 0, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        out = self.step(*args, **kwargs)
        self.seconds += time.thread_time() - began
        self.calls += 1
        return out


def planned() -> Plan:
    return flowgraph.compile(
        "graphs/quickstart.yaml",
        {
            "dims.group": GROUPS,
            "dims.sample": SAMPLES,
            "dims.prompt": {"mean": 200, "max": 512},
            "dims.response": {"mean": 2000, "max": 32768},
            "hops.dispatch.in.version.max_lag": LAG,
            "hops.dispatch.with": {"target": 100_000},
        },
    )


def measured(plan: Plan, *, clocked: bool) -> tuple[float, int, float, dict[str, Clocked]]:
    """Seconds and events of the steps after those, trajectories in flight meanwhile, and the folds' clocks."""
    ring = Ring(endless(plan), fit(make(SETTINGS), plan))
    ring.run(30, 0)
    clocks = {}
    if clocked:
        for name, fold in ring.folds.all.items():
            fold.step = clocks[name] = Clocked(fold.step)
    before, began, since = ring.ledger.counts.events, time.process_time(), ring.meter.now
    area = ring.meter.area[IN_FLIGHT]
    ring.run(STEPS, 0)
    seconds = time.process_time() - began
    return (
        seconds,
        ring.ledger.counts.events - before,
        (ring.meter.area[IN_FLIGHT] - area) / (ring.meter.now - since),
        clocks,
    )


def loop() -> float:
    """Milliseconds of a loop of a million turns that does nothing: how fast this core is, for comparison."""
    took = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(1_000_000):
            pass
        took.append(1e3 * (time.process_time() - began))
    return min(took)


def clock_costs() -> float:
    """Seconds that `Clocked` measures around nothing."""
    clock = Clocked(lambda state: None)
    for _ in range(100_000):
        clock(None)
    return clock.seconds / clock.calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    plan, empty = planned(), clock_costs()
    rates, folds = [], {}
    for _ in range(runs):
        seconds, n, in_flight, _ = measured(plan, clocked=False)
        rates.append(n / seconds)
        _, n, _, clocks = measured(plan, clocked=True)
        for name, clock in clocks.items():
            spent = 1e6 * (clock.seconds - clock.calls * empty)
            folds.setdefault(name, []).append((spent / n, spent / clock.calls, clock.calls / n))
    print(
        f"{ENGINES:,} engines, {in_flight:,.0f} trajectories in flight; median of {runs} runs, best in brackets"
    )
    print(f"  the whole   {statistics.median(rates):>9,.0f} events/s  [{max(rates):,.0f}]")
    total = [sum(found[i][0] for found in folds.values()) for i in range(runs)]
    print(f"  all folds   {statistics.median(total):>9.2f} us an event  [{min(total):.2f}]")
    for name, found in folds.items():
        event, call, calls = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"  {name:<12}{event:>9.2f} us an event: {call:.2f} us a call, {calls:.2f} calls an event")


if __name__ == "__main__":
    main()
