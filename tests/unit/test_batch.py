"""The batch policies, as pure functions of what is ready."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowgraph import Row
from hops.batch import Counter, oldest_first

SIZES = {"groups": 1, "samples": 2, "max_lag": 5}


def row(key: int, uid: int) -> Row:
    return Row("trajectory", key, (Row("group", uid),))


def choose(
    state: Counter, scores: dict[int, list[float]], **more: Any
) -> tuple[list[int], list[tuple[int, str]]]:
    """Two trajectories a group, in order of their keys: those that are chosen, and those that are dropped and why."""
    given: Any = {key: np.array(value, np.float32) for key, value in scores.items()}
    done = oldest_first(state, tuple(row(key, key // 2) for key in scores), given, **SIZES, **more)
    chosen = [r.key for step in done.leaves for r in step.parents]
    return chosen, [(d.row.key, d.reason) for d in done.dropped]


def test_groups_of_equal_scores_are_dropped_whole_and_the_next_is_taken() -> None:
    scores = {0: [1.0, 1.0], 1: [1.0], 2: [0.0], 3: [1.0]}
    dropped = [(0, "equal scores"), (1, "equal scores")]
    assert choose(Counter(), scores, drop_equal=True) == ([2, 3], dropped)


def test_scores_are_not_looked_at_unless_that_is_asked_for() -> None:
    assert choose(Counter(), {0: [1.0], 1: [1.0]}) == ([0, 1], [])


def test_a_group_that_is_not_complete_may_still_differ() -> None:
    assert choose(Counter(), {0: [1.0]}, drop_equal=True) == ([], [])


def test_scores_that_differ_by_rounding_are_equal_and_those_within_one_trajectory_count() -> None:
    assert choose(Counter(), {0: [1.0], 1: [1.0 + 1e-7]}, drop_equal=True)[0] == []
    assert choose(Counter(), {0: [0.0, 1.0], 1: [0.0, 1.0]}, drop_equal=True)[0] == [0, 1]


def test_what_is_too_old_is_stale_whatever_its_scores() -> None:
    state = Counter(batch_id=6)
    assert choose(state, {0: [1.0], 1: [1.0]}, drop_equal=True) == ([], [(0, "stale"), (1, "stale")])
