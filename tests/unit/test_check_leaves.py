"""The check that each sampled token is trained in exactly one leaf: it passes what is right, and names what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hops.check import one_leaf_per_token

# Trajectory 7 forks: tokens 0 and 1 are in both of its leaves. Trajectory 8 has one leaf.
SAMPLED = [-1, 0, 1, 2, -1, 0, 1, -1, 3, -1, 0]
MASK = [0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1]
OFFSETS = [0, 4, 9, 11]
TRAJECTORY = [7, 7, 8]


def check(mask: Any = MASK, sampled: Any = SAMPLED) -> dict[str, float]:
    return one_leaf_per_token(
        np.array(mask, np.bool_), np.array(sampled, np.int32), np.array(TRAJECTORY), np.array(OFFSETS)
    ).metrics


def changed(values: list[int], at: int, value: int) -> list[int]:
    return [value if i == at else old for i, old in enumerate(values)]


def test_m3_a_forked_trajectory_passes() -> None:
    assert check() == {"leaves": 3, "forks": 1}


def test_what_is_marked_twice_or_not_at_all_is_named() -> None:
    with pytest.raises(ValueError, match="trajectory 7: its sampled token 1 is trained on in 2 leaves"):
        check(changed(MASK, 6, 1))
    with pytest.raises(ValueError, match="trajectory 7: its sampled token 2 is trained on in 0 leaves"):
        check(changed(MASK, 3, 0))


def test_what_was_not_sampled_must_not_be_trained_on() -> None:
    with pytest.raises(ValueError, match="trajectory 7: token 7 of the batch was not sampled"):
        check(changed(MASK, 7, 1))


def test_a_sampled_token_that_is_in_no_leaf_is_named() -> None:
    with pytest.raises(ValueError, match="trajectory 8: its sampled token 0 is in no leaf"):
        check(sampled=changed(SAMPLED, 10, 1))


def test_a_batch_without_a_sampled_token_passes() -> None:
    assert check([0] * 11, [-1] * 11) == {"leaves": 3, "forks": 1}
