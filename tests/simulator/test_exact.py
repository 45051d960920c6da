"""The simulator where the answer is known: order statistics, queues without chance, Little's law."""

from __future__ import annotations

import math

import pytest

import flowgraph
from flowgraph.simulator.lengths import Lengths

GRAPH = "graphs/quickstart.yaml"
B = 8
MOST = 1_000_000
SYNCHRONOUS = [f"dims.group={B}", "dims.sample=1", f"dims.response={{mean: 1000, max: {MOST}}}"]
STEP = 0.01  # seconds a token


def _harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


# Of B draws, the mean and the standard deviation of the largest.
LARGEST = {
    "fixed:1000": (1000.0, 0.0),
    "exponential:1000": (1000 * _harmonic(B), 1000 * math.sqrt(sum(1 / k**2 for k in range(1, B + 1)))),
    "uniform:500,1500": (500 + 1000 * B / (B + 1), 1000 * math.sqrt(B / ((B + 1) ** 2 * (B + 2)))),
}


def _alone(steps: int, lengths: str, train: float = 3.0) -> flowgraph.Simulated:
    """B engines with one slot each, and no cost but a fixed one a token."""
    return flowgraph.simulate(
        GRAPH, steps=steps, overrides=SYNCHRONOUS, engines=B, slots=1, lengths=lengths, warmup=0,
        train_seconds=train, speed={"step": STEP, "per_request": 0.0, "prefill": math.inf},
    )  # fmt: skip


@pytest.mark.parametrize("lengths", LARGEST)
def test_a_synchronous_step_is_as_long_as_its_longest_response_and_its_training(lengths: str) -> None:
    steps = 300
    done = _alone(steps, lengths)
    drawn = Lengths(lengths, most=MOST, seed=0, stream=1)
    for i, point in enumerate(done.points):
        longest = max(drawn.at(i * B + j) for j in range(B))
        assert point.seconds == pytest.approx(longest * STEP + 3.0, rel=1e-9)
    mean, deviation = LARGEST[lengths]
    bound = (
        4 * deviation / math.sqrt(steps) + 0.5
    )  # tokens; four standard errors, and half a token of rounding
    assert (done.step_seconds - 3.0) / STEP == pytest.approx(mean, abs=bound)
    assert done.lag.counts == {0: steps * B}


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LARGEST)
def test_the_mean_step_of_20000_is_within_one_percent_of_the_closed_form(lengths: str) -> None:
    steps = 20_000
    done = _alone(steps, lengths)
    mean, deviation = LARGEST[lengths]
    error = deviation / math.sqrt(steps)
    assert 3 * error < 0.011 * mean, "the bound is tight"
    assert (done.step_seconds - 3.0) / STEP == pytest.approx(mean, abs=3 * error + 0.5)


def test_requests_that_share_an_engine_slow_each_other_down_as_the_closed_form_says() -> None:
    """While k are left, the next ends after mean/k tokens of a + b·k seconds: in all mean·(a·H_B + b·B)."""
    a, b, mean, steps = 0.01, 0.002, 1000.0, 400
    done = flowgraph.simulate(
        GRAPH, steps=steps, overrides=SYNCHRONOUS, engines=1, slots=B, lengths=f"exponential:{mean}", warmup=0,
        speed={"step": a, "per_request": b, "prefill": math.inf},
    )  # fmt: skip
    deviation = mean * math.sqrt(sum(((a + b * k) / k) ** 2 for k in range(1, B + 1)))
    expected = mean * (a * _harmonic(B) + b * B)
    assert done.step_seconds == pytest.approx(expected, abs=4 * deviation / math.sqrt(steps))


@pytest.mark.parametrize(("train", "bound"), [(1.0, "engines"), (60.0, "trainer")])
def test_without_chance_an_asynchronous_ring_is_as_fast_as_its_slower_side(train: float, bound: str) -> None:
    tokens, engines = 1000, 2
    done = flowgraph.simulate(
        GRAPH, steps=60, overrides=[*SYNCHRONOUS, "hops.dispatch.in.version.max_lag=2"], engines=engines, slots=1,
        lengths=f"fixed:{tokens}", train_seconds=train, warmup=20,
        speed={"step": STEP, "per_request": 0.0, "prefill": math.inf},
    )  # fmt: skip
    generation = B * tokens * STEP / engines
    assert done.step_seconds == pytest.approx(max(train, generation), rel=1e-9)
    if bound == "engines":
        assert done.slots_empty == pytest.approx(0, abs=1e-9)
        assert done.trainer_idle == pytest.approx(1 - train / generation)
    else:
        assert done.trainer_idle == pytest.approx(0, abs=1e-9)
        assert done.slots_empty == pytest.approx(1 - generation / train)


@pytest.mark.parametrize("max_lag", [0, 3])
@pytest.mark.parametrize("failures", [0.0, 0.1])
def test_in_flight_is_rate_times_time_in_flight(max_lag: int, failures: float) -> None:
    """Little's law, L = λ·W: the left by integrating the ledger over time, the right by each trajectory's clock."""
    done = flowgraph.simulate(
        GRAPH, steps=40, overrides=[f"hops.dispatch.in.version.max_lag={max_lag}"], engines=3, slots=10, kv=3000,
        lengths="lognormal:80,1.5", prompts="uniform:10,200", train_seconds=2.0, sync_seconds=1.0, failures=failures,
        speed={"step": 0.02, "per_token": 1e-6}, warmup=7,
    )  # fmt: skip
    rate = done.finished / done.seconds
    assert done.in_flight == pytest.approx(rate * (done.residence / done.finished), rel=1e-9)
    assert done.in_flight > 1
    assert done.ledger.dispatched == (
        done.ledger.in_flight + done.ledger.ready + done.ledger.consumed + sum(done.ledger.dropped.values())
    )
    assert bool(done.ledger.dropped.get("failed")) == bool(failures)
    assert done.lag.max <= max_lag


def test_time_in_flight_alone_is_the_request_itself() -> None:
    done = flowgraph.simulate(
        GRAPH, steps=10, overrides=SYNCHRONOUS, engines=B, slots=1, lengths="fixed:100", prompts="fixed:40", warmup=0,
        speed={"step": 0.5, "per_request": 0.25, "prefill": 20.0},
    )  # fmt: skip
    assert done.flight_seconds == pytest.approx(100 * 0.75 + 40 / 20.0)
