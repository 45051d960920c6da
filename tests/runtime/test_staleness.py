"""How stale a trained row can be: the bound is never exceeded in order, is reached, and max_lag holds in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.simulated import Duration, heavy_tailed, simulate

ROLLOUT = ("rollout",)
UNGATED = 40  # a max_lag that no run here comes near
SIZES = {"groups": st.integers(1, 3), "samples": st.integers(1, 3)}
SLACK = st.integers(0, 12)
TARGETS = st.sampled_from([None, 1, 2, 5])
runs = settings(max_examples=40, deadline=None)


def bound(batch: int, capacity: int, queue: int, every: int = 1) -> int:
    """The largest lag of a trained row when trajectories finish in order of dispatch: ceil(N/B) − 1 + Q + o + (k − 1).

    N: trajectories in flight and ready at once, which is the ready buffer's capacity: dispatch sends one only while
    fewer are in flight than the buffer has free. B: trajectories in a batch. Q: the train queue's depth.
    o = 1: rollout goes on while a batch is trained. k: a version is published every k batches.

    Proof. Number trajectories from 0 in order of dispatch. Let trajectory i be sent when c batches are made and v is
    the version. Those batches took c·B trajectories, so i ≤ c·B + N − 1. In order, i is in batch floor(i/B), at
    most c + ceil(N/B) − 1. A batch is made only while at most Q made before it are untrained, so at least c − Q − 1
    are trained and synced, and at most k − 1 of those are not yet published: v ≥ c − Q − 1 − (k − 1). The lag is
    the difference. Each step is an equality when the trainer is slow and the rollout is not.

    How many are in flight (`target`) does not matter: what finishes stays, as ready, until it is taken.
    """
    return math.ceil(capacity / batch) - 1 + queue + 1 + (every - 1)


def ring_of(
    groups: int,
    samples: int,
    *,
    max_lag: int,
    steps: int,
    capacity: int | None = None,
    queue: int = 0,
    every: int = 1,
    target: int | None = None,
) -> list[str]:
    """Overrides of the toy ring. capacity: of the buffer; queue: of steps; every: of sync; target: in flight."""
    return [
        f"dims.group={groups}",
        f"dims.sample={samples}",
        f"hops.dispatch.in.version.max_lag={max_lag}",
        f"hops.dispatch.with={{target: {target}}}" if target else "hops.dispatch.with={}",
        f"hops.buffer.with={{capacity: {capacity}}}" if capacity else "hops.buffer.with={}",
        f"hops.batch.capacity={queue}",
        f"hops.sync.in.weights={{from: train, every: {every}}}",
        f"run.steps={steps}",
    ]


def drawn(seed: int, straggler: float = 0.0, **scale: float) -> Duration:
    """Durations of every hop, of a scale that each may have of its own."""
    rng = np.random.default_rng(seed)
    return lambda hop: scale.get(hop, 0.1) * heavy_tailed(rng, straggler if hop == "rollout" else 0.0)


def worst(steps: list[dict[str, int]]) -> int:
    return max(step["lag_max"] for step in steps)


@runs
@given(
    **SIZES,
    slack=SLACK,
    queue=st.integers(0, 3),
    every=st.integers(1, 3),
    target=TARGETS,
    seed=st.integers(0, 2**32),
    rollout=st.sampled_from([0.1, 1.0, 10.0]),
    train=st.sampled_from([0.1, 1.0, 10.0]),
    sync=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_in_order_no_row_is_staler_than_the_bound(
    groups: int, samples: int, slack: int, queue: int, every: int, target: int | None, seed: int,
    rollout: float, train: float, sync: float,
) -> None:  # fmt: skip
    batch = groups * samples
    capacity = batch + slack
    limit = bound(batch, capacity, queue, every)
    options = {"capacity": capacity, "queue": queue, "target": target, "every": every}
    ring, steps = simulate(
        "hops.dispatch.use=tests.runtime.simulated.drip",
        *ring_of(groups, samples, max_lag=UNGATED, steps=8, **options),
        duration=drawn(seed, rollout=rollout, train=train, sync=sync),
        in_order=ROLLOUT,
    )
    assert len(steps) == 8
    assert worst(steps) <= limit
    assert set(ring.ledger.counts.dropped) <= {"run ended"}


@runs
@given(**SIZES, slack=SLACK, queue=st.integers(0, 3), every=st.integers(1, 3), target=TARGETS)
def test_in_order_a_slow_trainer_reaches_the_bound(
    groups: int, samples: int, slack: int, queue: int, every: int, target: int | None
) -> None:
    batch = groups * samples
    capacity = batch + slack
    limit = bound(batch, capacity, queue, every)
    _, steps = simulate(
        "hops.dispatch.use=tests.runtime.simulated.drip",
        *ring_of(
            groups, samples, max_lag=UNGATED, steps=limit + 2 * every, capacity=capacity, queue=queue,
            target=target, every=every,
        ),
        duration=lambda hop: 1000.0 if hop == "train" else 0.001,
        in_order=ROLLOUT,
    )  # fmt: skip
    assert worst(steps) == limit


def test_queue_depth_amplifies_staleness() -> None:
    """B = 4 and N = 8: ceil(8/4) − 1 + Q + 1 is 2, 3, 4, 5 for Q from 0."""
    reached = []
    for queue in range(4):
        _, steps = simulate(
            "hops.dispatch.use=tests.runtime.simulated.drip",
            *ring_of(2, 2, max_lag=UNGATED, steps=8, capacity=8, queue=queue),
            duration=lambda hop: 1000.0 if hop == "train" else 0.001,
            in_order=ROLLOUT,
        )
        reached.append(worst(steps))
    assert reached == [2, 3, 4, 5]


@runs
@given(**SIZES, slack=SLACK, max_lag=st.integers(0, 3), queue=st.integers(0, 3), target=TARGETS)
def test_in_order_the_gate_of_dispatch_and_the_bound_hold_together(
    groups: int, samples: int, slack: int, max_lag: int, queue: int, target: int | None
) -> None:
    """With `watermark` a slow trainer's rows are as stale as the lower of both admits, so nothing is ever dropped."""
    batch, queue = groups * samples, min(queue, max_lag)
    capacity = batch + slack
    ring, steps = simulate(
        *ring_of(groups, samples, max_lag=max_lag, steps=10, capacity=capacity, queue=queue, target=target),
        duration=lambda hop: 1000.0 if hop == "train" else 0.001,
        in_order=ROLLOUT,
    )
    assert worst(steps) == min(max_lag, bound(batch, capacity, queue))
    assert ring.ledger.counts.dropped == {}


@runs
@given(
    **SIZES,
    slack=st.none() | SLACK,
    max_lag=st.integers(0, 3),
    queue=st.integers(0, 3),
    every=st.integers(1, 3),
    target=TARGETS,
    straggler=st.sampled_from([0.0, 0.02, 0.2]),
    seed=st.integers(0, 2**32),
    train=st.sampled_from([0.01, 1.0, 10.0]),
    sync=st.sampled_from([0.01, 1.0]),
)
def test_in_any_order_no_row_is_staler_than_max_lag_and_the_run_goes_on(
    groups: int, samples: int, slack: int | None, max_lag: int, queue: int, every: int, target: int | None,
    straggler: float, seed: int, train: float, sync: float,
) -> None:  # fmt: skip
    batch = groups * samples
    options = {
        "capacity": None if slack is None else batch + slack,
        "queue": min(queue, max_lag),
        "every": min(every, max_lag + 1),
        "target": target,
    }
    ring, steps = simulate(
        *ring_of(groups, samples, max_lag=max_lag, steps=10, **options),
        duration=drawn(seed, straggler, rollout=1.0, train=train, sync=sync),
    )
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert worst(steps) <= max_lag
    counts = ring.ledger.counts
    assert counts.consumed == 10 * batch
    assert counts.dispatched == counts.consumed + sum(counts.dropped.values())


@pytest.mark.parametrize("max_lag", [1, 2])
def test_a_rollout_of_a_hundred_steps_is_dropped_with_its_group(max_lag: int) -> None:
    """Counting what is admitted bounds how many rows there are, not how old one of them is: assembly does."""
    times = iter([100.0])
    ring, steps = simulate(
        *ring_of(2, 2, max_lag=max_lag, steps=150),
        duration=lambda hop: next(times, 0.5) if hop == "rollout" else 0.1,
    )
    assert worst(steps) <= max_lag
    assert ring.ledger.counts.dropped == {"stale": 2}
    assert ring.ledger.counts.consumed == 150 * 4
