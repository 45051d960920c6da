"""Inputs on which rings went wrong: who is trained, and how often, when some prompts take longer than others."""

from __future__ import annotations

import pytest

from flowgraph.runtime.rows import Record
from tests.runtime.test_machine import ring_of
from tests.runtime.virtual import Virtual, in_time, plan_of

BATCH = 4 * 2


def slow_share(policy: str, max_lag: int, slow: float) -> tuple[float, float, Virtual]:
    """Of every four prompts one kind takes `slow` times longer: its share of what was sent, and of what was trained."""
    flow = Virtual(plan_of(*ring_of(4, 2, max_lag, policy=policy, steps=60)))

    def seconds(hop: str, record: Record) -> float:
        if hop == "rollout":
            return slow if record.row.uid % 4 == 0 else 1.0
        return 0.5 if hop == "train" else 0.0

    in_time(flow, seconds)
    assert [len(step) for step in flow.taught] == [BATCH] * 60
    sent = flow.ledger.counts.dispatched
    trained = [key for step in flow.taught for key in step]
    of_kind = [key for key in range(sent) if key // 2 % 4 == 0]
    return len(of_kind) / sent, sum(key // 2 % 4 == 0 for key in trained) / len(trained), flow


@pytest.mark.parametrize("max_lag", [0, 1, 2, 3])
def test_a_prompt_that_is_ten_times_slower_is_trained_as_often_as_it_is_sent(max_lag: int) -> None:
    """Case S3: admission and waiting do not starve it."""
    sent, trained, flow = slow_share("wait", max_lag, 10.0)
    assert trained == pytest.approx(sent, abs=0.02)
    assert flow.ledger.counts.dropped == {}


def test_dropping_what_is_late_starves_it_and_says_so() -> None:
    sent, trained, flow = slow_share("drop", 1, 10.0)
    assert trained < sent / 2
    assert flow.ledger.counts.dropped["stale"] > 0


@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_a_slow_push_of_the_weights_is_no_deadlock(policy: str) -> None:
    """Case S4: max_lag 0, and every new trajectory would be a version old by the time that weights arrive."""
    flow = Virtual(plan_of(*ring_of(2, 2, 0, policy=policy, steps=10)))
    took = in_time(flow, lambda hop, record: {"sync": 100.0, "rollout": 1.0}.get(hop, 0.0))
    assert took == pytest.approx(10 * 101.0, abs=1.0)
    assert {lag for step in flow.lags for lag in step} == {0}
    assert flow.ledger.counts.dropped == {}


@pytest.mark.parametrize("capacity", [8, 10, 16])
def test_a_full_buffer_holds_dispatch_back_and_evicts_nothing(capacity: int) -> None:
    """Case S9."""
    options = ring_of(4, 2, 1, slack=capacity - BATCH, steps=12)
    flow = Virtual(plan_of(*options))
    most = 0

    def seconds(hop: str, record: Record) -> float:
        nonlocal most
        most = max(most, flow.ledger.counts.in_flight + flow.ledger.counts.ready)
        return 50.0 if hop == "train" else 0.1

    in_time(flow, seconds)
    assert most == capacity
    assert flow.ledger.counts.dropped == {}


def test_a_watermark_that_adapts_keeps_the_lag_low_where_training_is_the_slower_side() -> None:
    """Each waits as long as all that was sent before it; what only ages is not sent."""

    def lag(adapt: bool) -> float:
        flow = Virtual(plan_of(*ring_of(4, 2, 3, steps=40, adapt=adapt)))
        took = in_time(flow, lambda hop, record: {"train": 10.0, "rollout": 1.0}.get(hop, 0.0))
        assert took < 40 * 10.0 + 30.0, "training is never kept waiting"
        return sum(map(sum, flow.lags)) / (40 * BATCH)

    assert lag(adapt=False) > 2.5
    assert lag(adapt=True) < 1.6
