"""Trajectories that come to nothing, or wait: the slot is free, the group is handled, everything is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowgraph import Rejected
from flowgraph.errors import HopError, LedgerError, RunError
from flowgraph.runtime.messages import Block, Done, Fire, FromWorker, Gone, Interrupt
from flowgraph.runtime.run import ExecutorName
from flowgraph.runtime.transport import arenas
from flowgraph.runtime.worker import Worker
from hops.candidates import SIBLING
from hops.rollout import within
from tests.runtime.harness import run_toy, summary
from tests.runtime.virtual import ENGINE, Virtual, in_time, plan_of

USERS = "tests.runtime.users"
EARLY = (
    "hops.reward={use: tests.runtime.toy.reward, in: {tokens: rollout, leaf_offsets: rollout, ground_truth: rollout}}",
    "hops.buffer.in.trajectory=reward",
    "hops.dispatch.in.finished=reward",
)


@pytest.mark.parametrize("executor", ["inproc", "processes"])
@pytest.mark.parametrize("early", [(), EARLY], ids=["reward after", "reward before"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_what_a_hop_rejects_is_dropped_and_counted_and_others_are_sampled(
    tmp_path: Path, executor: ExecutorName, early: tuple[str, ...], max_lag: int
) -> None:
    """Cases S5, S12."""
    more = (f"hops.dispatch.in.version.max_lag={max_lag}", f"hops.rollout.use={USERS}.refuses")
    done = run_toy(tmp_path, *more, "hops.rollout.with={}", *early, executor=executor)
    ledger = summary(done.directory)["ledger"]
    dropped = {reason: n for reason, n in ledger["dropped"].items() if reason != "run ended"}
    assert done.steps == 6
    assert ledger["consumed"] == 6 * 6
    assert set(dropped) == {"refused"}
    assert dropped["refused"] >= 5 * 3, "of the groups 0, 3, 6, 9, 12, … all three"
    assert ledger["dispatched"] == ledger["consumed"] + sum(ledger["dropped"].values())


def test_of_a_group_with_a_failed_member_nobody_is_trained(tmp_path: Path) -> None:
    done = run_toy(tmp_path, f"hops.rollout.use={USERS}.refuses", "hops.rollout.with={of: 2}")
    dropped = summary(done.directory)["ledger"]["dropped"]
    assert dropped["refused"] > 0
    assert dropped[SIBLING] > 0
    assert sum(dropped.values()) % 3 == 0


def test_only_a_trajectory_may_be_rejected(tmp_path: Path) -> None:
    more = f"hops.look={{use: {USERS}.refuses_a_step, in: {{tokens: batch}}}}"
    with pytest.raises(HopError, match="hop look, which works on no trajectory: Rejected: refused"):
        run_toy(tmp_path, more)


def test_what_came_to_nothing_can_not_be_trained(tmp_path: Path) -> None:
    more = (f"hops.rollout.use={USERS}.refuses", "hops.rollout.with={}", "hops.eval=null")
    with pytest.raises(LedgerError, match=r"batch can't choose trajectory 0: it came to nothing \(refused\)"):
        run_toy(tmp_path, *more[:2], f"hops.batch.use={USERS}.takes_what_came_to_nothing")


def test_steps_that_training_has_no_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"hop batch makes 1 step rows at once, and there is room for 0"):
        run_toy(tmp_path, f"hops.batch.use={USERS}.has_no_credit")


TAKES = f"hops.batch={{use: {USERS}.takes, in: {{ready: buffer}}, with: {{size: SIZE}}}}"


@pytest.mark.parametrize("executor", ["inproc", "processes"])
def test_what_is_older_than_max_lag_is_never_trained_whatever_the_batch(
    tmp_path: Path, executor: ExecutorName
) -> None:
    with pytest.raises(LedgerError, match=r"trains trajectory \d+ at a lag of 1, and max_lag is 0"):
        run_toy(tmp_path, TAKES.replace("SIZE", "2"), executor=executor)


def test_what_was_trained_before_is_named_even_where_nothing_of_it_is_left(tmp_path: Path) -> None:
    with pytest.raises(
        LedgerError, match=r"hop batch can't choose trajectory \d+: it was consumed or dropped before"
    ):
        run_toy(tmp_path, TAKES.replace("SIZE", "6, twice: true"), "hops.dispatch.in.version.max_lag=1")


def test_a_batch_that_drops_everything_ends_by_name() -> None:
    flow = Virtual(plan_of(f"hops.batch.use={USERS}.drops_all"))
    with pytest.raises(
        RunError, match=r"6001 trajectories were dropped by batch since step 0.*\n.*for: no good"
    ):
        in_time(flow, lambda hop, record: 1.0)


def test_a_reason_is_given_and_is_short_enough_to_count_by() -> None:
    assert Rejected("no\n answer " + "x" * 500).reason == "no answer " + "x" * 70
    with pytest.raises(ValueError, match="for a reason"):
        Rejected("")


# --- time limit ----------------------------------------------------------------------------------------------------


def test_what_takes_longer_than_its_limit_is_rejected_and_cancelled() -> None:
    """Case S12: one environment hangs."""
    ended = []

    async def hangs() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    with pytest.raises(Rejected, match="time limit"):
        asyncio.run(within(0.01, hangs()))
    assert ended == [True]


def test_a_timeout_of_its_own_is_no_time_limit() -> None:
    async def fails() -> None:
        raise TimeoutError("a socket")

    with pytest.raises(TimeoutError, match="a socket"):
        asyncio.run(within(60, fails()))
    assert asyncio.run(within(None, asyncio.sleep(0, 7))) == 7


# --- held ----------------------------------------------------------------------------------------------------------


def test_a_firing_that_is_interrupted_is_gone_and_one_that_is_over_is_not() -> None:
    plan = plan_of("hops.rollout.with={jitter: 0.0, hang_at: 7}")
    said: list[FromWorker] = []

    async def both(worker: Worker) -> None:
        await worker.start()
        for id, prompt in ((1, 7), (2, 5)):
            dataset[0:8] = prompt.to_bytes(4, "little") + b"\0\0\0\0"
            blocks = {"dataset": [Block(0, (1, 2))], "dispatch": [Block(64)]}
            worker.handle(Fire(id, "rollout", 0, blocks, [1], {}, {}))
            await asyncio.sleep(0.01)
        worker.handle(Interrupt(1))
        worker.handle(Interrupt(2))
        worker.handle(Interrupt(3))
        await asyncio.sleep(0.01)
        await worker.close()

    with arenas(plan, alone=True) as memory:
        dataset = memory.open("driver", ["driver"])["driver"].view
        worker = Worker(plan, "rollout", {}, memory.open("rollout", plan.owners), said.append)
        asyncio.run(both(worker))
    assert [type(one) for one in said[1:]] == [Done, Gone], said
    assert said[2] == Gone(1, "")
    assert (worker.tasks, worker.interrupted) == ({}, set())


PRESSED = (
    *ENGINE,
    "hops.dispatch.in.version.max_lag=1",
    "hops.dispatch.in.backlog={from: rollout, delay: 1}",
)


def waiting(flow: Virtual) -> list[int]:
    return sorted(key for _, key in flow.parked)


def pressed(flow: Virtual, backlog: int, watermark: int) -> None:
    """The engine can't keep up, and dispatch has made its watermark smaller."""
    flow.state("dispatch").pace.watermark = float(watermark)
    flow.publish("rollout", "backlog", backlog)
    flow.folds.all["dispatch"].changed = True
    flow.turn()


def test_a_firing_that_is_interrupted_before_it_has_begun_is_gone_too() -> None:
    plan = plan_of("hops.rollout.with={jitter: 0.0}")
    said: list[FromWorker] = []

    async def at_once(worker: Worker) -> None:
        await worker.start()
        worker.handle(Fire(7, "rollout", 0, {}, [1], {}, {}))
        worker.handle(Interrupt(7))
        await asyncio.sleep(0.01)
        await worker.close()

    with arenas(plan, alone=True) as memory:
        worker = Worker(plan, "rollout", {}, memory.open("rollout", plan.owners), said.append)
        asyncio.run(at_once(worker))
    assert said[1:] == [Gone(7, "")]


def test_the_youngest_wait_and_those_that_waited_longest_go_on_first() -> None:
    """Case S13: the engine's KV use passes the high mark: in flight shrinks, youngest first."""
    flow = Virtual(plan_of(*PRESSED))
    assert flow.keys("rollout") == list(range(12))
    pressed(flow, 1, watermark=9)
    assert flow.told_to_stop == [("rollout", 11), ("rollout", 10), ("rollout", 9)]
    flow.ends("rollout", 10)  # it was done before it heard
    flow.stops("rollout", 11)
    flow.stops("rollout", 9)
    assert waiting(flow) == [9, 11]
    assert flow.told_to_stop == [], "two wait, and nine are at the engine"
    flow.ends("rollout", 0)
    flow.ends("rollout", 1)
    assert (waiting(flow), flow.ledger.counts.in_flight) == ([], 9)
    assert flow.keys("rollout") == [2, 3, 4, 5, 6, 7, 8, 9, 11]


def test_another_waits_in_place_of_one_that_ended_before_it_heard() -> None:
    """What dispatch says stays the same, for one fewer is in flight and the watermark is lower too."""
    flow = Virtual(plan_of(*PRESSED))
    pressed(flow, 1, watermark=11)
    assert flow.told_to_stop == [("rollout", 11)]
    flow.state("dispatch").pace.watermark = 10.0
    flow.ends("rollout", 11)
    assert flow.told_to_stop == [("rollout", 10)]
    flow.stops("rollout", 10)
    assert waiting(flow) == [10]


def test_what_waits_goes_on_when_the_engine_has_caught_up_and_not_before_there_is_room() -> None:
    flow = Virtual(plan_of(*PRESSED))
    pressed(flow, 1, watermark=9)
    for key in (11, 10, 9):
        flow.stops("rollout", key)
    pressed(flow, 0, watermark=9)
    assert waiting(flow) == [9, 10, 11], "as many as the watermark are still at the engine"
    pressed(flow, 0, watermark=11)
    assert (waiting(flow), flow.keys("rollout")) == ([11], list(range(11)))
    pressed(flow, 0, watermark=12)
    assert flow.keys("rollout") == list(range(12))


def test_who_was_told_to_stop_and_is_wanted_again_goes_on() -> None:
    flow = Virtual(plan_of(*PRESSED))
    pressed(flow, 1, watermark=11)
    pressed(flow, 0, watermark=12)
    flow.stops("rollout", 11)
    assert (flow.parked, flow.keys("rollout")) == ({}, list(range(12)))
