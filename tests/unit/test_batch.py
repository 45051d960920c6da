"""The batch policies, as pure functions of what came: rows one by one, in the order of arrival."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

from flowgraph import Row
from hops.batch import oldest_first, withhold
from hops.candidates import SIBLING, Candidates

SIZES = {"n_groups": 1, "samples": 2, "max_lag": 5}


def row(key: int, uid: int | None = None, tag: int = 0, failed: str = "") -> Row:
    """A trajectory; two a group unless its uid is given."""
    return Row("trajectory", key, (Row("group", key // 2 if uid is None else uid),), tag, failed=failed)


class Made:
    """What a policy decided over several calls: keys of each step, key and reason of each drop."""

    def __init__(self, policy: Any = oldest_first, state: Candidates | None = None, **options: Any) -> None:
        self.policy, self.state = policy, state or Candidates()
        self.options = {**SIZES, "credit": 1, **options}
        self.steps: list[list[int]] = []
        self.lags: list[list[int]] = []
        self.dropped: list[tuple[int, str]] = []
        self.withheld: list[tuple[int, float]] = []
        self.short = self.expiring = -1

    def __call__(self, came: Row | None = None, **ports: Any) -> Made:
        done = self.policy(self.state, came, **ports, **self.options)
        for step in done.leaves:
            self.steps.append([r.key for r in step.parents])
            self.lags.append(step.lag.tolist())
            if self.policy is withhold:
                pairs = zip(step.withheld_uid.tolist(), step.withheld_score.tolist(), strict=True)
                self.withheld += list(pairs)
        self.dropped += [(d.row.key, d.reason) for d in done.dropped]
        self.short, self.expiring = done.short, done.expiring
        return self

    def all(self, rows: Iterable[Row]) -> Made:
        for one in rows:
            self(one)
        return self


def scored(made: Made, scores: dict[int, list[float]]) -> Made:
    for key, value in scores.items():
        made(row(key), score={key: np.array(value, np.float32)})
    return made


def test_groups_of_equal_scores_are_dropped_whole_and_the_next_is_taken() -> None:
    made = scored(Made(drop_equal=True), {0: [1.0, 1.0], 1: [1.0], 2: [0.0], 3: [1.0]})
    assert made.steps == [[2, 3]]
    assert made.dropped == [(0, "equal scores"), (1, "equal scores")]


def test_scores_are_not_looked_at_unless_that_is_asked_for() -> None:
    assert scored(Made(), {0: [1.0], 1: [1.0]}).steps == [[0, 1]]


def test_scores_that_differ_by_rounding_are_equal_and_those_within_one_trajectory_count() -> None:
    assert scored(Made(drop_equal=True), {0: [1.0], 1: [1.0 + 1e-7]}).steps == []
    assert scored(Made(drop_equal=True), {0: [0.0, 1.0], 1: [0.0, 1.0]}).steps == [[0, 1]]


def test_what_is_too_old_is_stale_whatever_its_scores() -> None:
    made = scored(Made(state=Candidates(batch_id=6), drop_equal=True), {0: [1.0], 1: [1.0]})
    assert (made.steps, made.dropped) == ([], [(0, "stale"), (1, "stale")])


def test_a_batch_that_is_never_made_ends_by_name_with_every_reason() -> None:
    made = Made(drop_equal=True, patience=2)
    made(row(0, failed="time limit"))
    with pytest.raises(ValueError, match=r"2 groups in a row .*time limit: 1, equal scores: 1.*another task"):
        scored(made, {1: [1.0], 2: [1.0], 3: [1.0]})


def test_the_oldest_group_goes_first_and_ties_go_by_the_arrival_of_the_last() -> None:
    made = Made(credit=0).all([row(4, tag=1), row(5, tag=1), row(2), row(0), row(1), row(3)])
    made.options["credit"] = 1
    assert made()()().steps == [[0, 1], [2, 3], [4, 5]]


def test_a_group_is_as_old_as_its_oldest_member() -> None:
    made = Made(credit=0).all([row(0, tag=1), row(1, tag=1), row(2, tag=2), row(3, tag=0)])
    made.options["credit"] = 1
    assert made().steps == [[2, 3]]


def test_no_step_is_made_without_credit_and_the_surplus_stays() -> None:
    """Case S8: more trajectories complete than the step needs."""
    made = Made(credit=0).all(row(key) for key in range(8))
    assert (made.steps, made.short) == ([], 0)
    made.options["credit"] = 1
    assert made().steps == [[0, 1]]
    assert made()()().steps == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made().short == 5


def test_queue_time_counts() -> None:
    """Case S2: registered at version 3, finished at 7, trained as batch 8: lag 5."""
    made = Made(state=Candidates(batch_id=8)).all([row(0, tag=3), row(1, tag=7)])
    assert made.lags == [[5, 1]]


def test_a_straggler_is_caught_when_the_batch_is_made() -> None:
    """Case S3b: one rollout of 100 steps among short ones."""
    made = Made(state=Candidates(batch_id=100)).all([row(0, tag=0), row(2, tag=100), row(3, tag=100)])
    assert (made.steps, made.dropped) == ([[2, 3]], [(0, "stale")])
    assert made(row(1, tag=100)).dropped == [(0, "stale"), (1, "stale")]
    assert made.state.dead == {}


def test_waiting_makes_no_batch_that_lets_one_in_flight_expire() -> None:
    made = Made(stale="wait", max_lag=0)
    for key in (0, 1, 2, 3):
        made(sent=row(key))
    assert made.all([row(2), row(3), row(0)]).steps == []
    assert made.short == 0, "training waits for a straggler, and not for more trajectories"
    assert made(row(1)).steps == [[2, 3]]
    assert made().dropped == [(0, "stale"), (1, "stale")], "more were sent than one batch takes"


def test_waiting_ends_when_what_it_waits_for_comes_to_nothing() -> None:
    made = Made(stale="wait", max_lag=0)
    for key in (0, 1, 2, 3):
        made(sent=row(key))
    made.all([row(2), row(3), row(0), row(1, failed="time limit")])
    assert made.steps == [[2, 3]]
    assert made.dropped == [(1, "time limit"), (0, SIBLING)]


def test_waiting_does_not_wait_for_what_another_batch_can_take() -> None:
    made = Made(stale="wait", max_lag=1)
    for key in (0, 1, 2, 3):
        made(sent=row(key))
    assert made.all([row(2), row(3)]).steps == [[2, 3]]
    made(sent=row(4, tag=1))
    assert made.all([row(0)]).steps == [[2, 3]]
    assert made.all([row(4, tag=1), row(1)]).steps == [[2, 3], [0, 1]]
    assert made.dropped == []


def test_what_a_batch_lets_expire_is_told() -> None:
    """The dry run: of those ready and in flight, who can be in no later batch."""
    made = Made(max_lag=0)
    for key in range(6):
        made(sent=row(key))
    made.all([row(2), row(3)])
    assert (made.steps, made.expiring) == ([[2, 3]], 4)
    made = Made(max_lag=1)
    for key in range(4):
        made(sent=row(key))
    assert made.all([row(2), row(3)]).expiring == 0


def test_one_that_came_to_nothing_takes_its_group_with_it_also_those_that_come_later() -> None:
    """Cases S5, S12: a rollout fails, or an environment hangs."""
    made = Made(samples=3).all([row(0, uid=0), row(1, uid=0, failed="time limit")])
    assert made.dropped == [(1, "time limit"), (0, SIBLING)]
    assert made(row(2, uid=0)).dropped[2:] == [(2, SIBLING)]
    assert (made.state.dead, made.state.units, made.state.alive) == ({}, {}, {})


def test_one_that_came_to_nothing_first_takes_its_group_with_it_too() -> None:
    made = Made(samples=3).all([row(0, uid=0, failed="a"), row(1, uid=0), row(2, uid=0, failed="b")])
    assert made.dropped == [(0, "a"), (1, SIBLING), (2, "b")]
    assert (made.state.dead, made.state.units, made.state.alive) == ({}, {}, {})


def test_partial_groups_are_taken_one_trajectory_at_a_time() -> None:
    made = Made(groups="partial").all([row(0), row(2), row(3, failed="x"), row(1)])
    assert made.steps == [[0, 2]]
    assert made.dropped == [(3, "x")], "its sibling was taken before, and is no worse for it"
    late = Made(groups="partial", max_lag=0, state=Candidates(batch_id=1))
    assert late.all([row(0), row(1, tag=1), row(2, tag=1)]).steps == [[1, 2]]
    assert late.dropped == [(0, "stale")]


def test_a_withheld_member_ships_no_tokens_and_shapes_its_group_all_the_same() -> None:
    """Case A10: part of a group is stale."""
    made = Made(withhold, max_lag=0, state=Candidates(batch_id=1))
    for key, tag, score in ((0, 0, 0.25), (1, 1, 1.0)):
        made(row(key, tag=tag), score={key: np.array([score], np.float32)})
    assert (made.steps, made.lags, made.withheld) == ([[1]], [[0]], [(0, 0.25)])
    assert made.dropped == [(0, "withheld")]


def test_a_group_of_which_all_are_stale_is_not_withheld_but_dropped() -> None:
    made = Made(withhold, max_lag=0, state=Candidates(batch_id=1))
    for key, tag in ((0, 0), (1, 0), (2, 0), (3, 1)):
        made(row(key, tag=tag), score={key: np.array([1.0], np.float32)})
    assert made.steps == [[3]]
    assert made.dropped == [(0, "stale"), (1, "stale"), (2, "withheld")]


def test_two_prompts_that_are_alike_are_two_groups() -> None:
    """Case A9: groups go by uid, and a uid is a row of the dataset."""
    assert Made(n_groups=2).all([row(0), row(1), row(2), row(3)]).steps == [[0, 1, 2, 3]]


def test_the_state_is_a_value_that_goes_on_where_it_was() -> None:
    rows = [row(0), row(2), row(3), row(1)]
    whole = Made(n_groups=2).all(rows)
    half = Made(n_groups=2).all(rows[:2])
    stored = msgspec.msgpack.encode(half.state)
    resumed = Made(n_groups=2, state=msgspec.msgpack.decode(stored, type=Candidates)).all(rows[2:])
    assert resumed.steps == whole.steps == [[0, 1, 2, 3]]


def test_a_member_without_a_score_is_neither_equal_nor_withheld() -> None:
    """Case A7."""
    made = Made(drop_equal=True, samples=3)
    for key, score, known in ((0, 1.0, True), (1, 0.0, False), (2, 1.0, True)):
        made(row(key, uid=0), score={key: np.array([score], np.float32)}, scored={key: np.array([known])})
    assert [reason for _, reason in made.dropped] == ["equal scores"] * 3
    late = Made(withhold, max_lag=0, state=Candidates(batch_id=1))
    for key, tag in ((0, 0), (1, 1)):
        late(row(key, tag=tag), score={key: np.zeros(1, np.float32)}, scored={key: np.array([key == 1])})
    assert (late.steps, late.withheld, late.dropped) == ([[1]], [], [(0, "withheld")])


@pytest.mark.parametrize(
    ("reason", "help"), [("time limit", "see the log of the rollout's owner"), ("stale", "raise max_lag")]
)
def test_who_loses_patience_says_what_to_look_at(reason: str, help: str) -> None:
    made = Made(samples=1, patience=2, max_lag=0, state=Candidates(batch_id=5 if reason == "stale" else 0))
    failed = "" if reason == "stale" else reason
    with pytest.raises(ValueError, match=f"2 groups in a row.*{reason}: 2.*{help}"):
        made.all([row(0, failed=failed), row(1, failed=failed)])
