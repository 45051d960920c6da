"""The lag of each token: trajectories that span an update of the weights."""

from __future__ import annotations

import numpy as np
import pytest

from hops.staleness import token_lag


def lag(versions: list[list[int]], batch_id: int) -> dict[str, float]:
    """Leaves as the versions of their tokens, -1 where nothing was sampled."""
    flat = np.array([v for leaf in versions for v in leaf], np.int32)
    bounds = np.cumsum([0, *map(len, versions)])
    return token_lag(flat, flat >= 0, bounds, np.array(batch_id)).metrics


def test_prompts_do_not_count_and_a_leaf_that_spans_an_update_is_told() -> None:
    assert lag([[-1, 3, 3, 4], [-1, -1, 5], [-1]], 5) == {
        "token_lag_mean": (2 + 2 + 1 + 0) / 4,
        "token_lag_max": 2,
        "spanning": 1 / 2,  # of the leaves that have a sampled token
    }


def test_on_policy_tokens_have_lag_zero() -> None:
    assert lag([[-1, 7], [-1, 7, 7]], 7) == {"token_lag_mean": 0, "token_lag_max": 0, "spanning": 0}


def test_a_change_between_leaves_spans_nothing_and_one_behind_an_observation_does() -> None:
    assert lag([[0, 0], [1, 1]], 1)["spanning"] == 0
    assert lag([[0, -1, 1]], 1)["spanning"] == 1


def test_a_batch_without_a_sampled_token_has_no_lag() -> None:
    assert lag([[-1, -1]], 3) == {}


def test_a_token_of_a_later_version_is_refused() -> None:
    with pytest.raises(ValueError, match="token 1 was sampled by version 4, and batch 3 trains it"):
        lag([[-1, 4]], 3)
    with pytest.raises(ValueError, match="token 0 was sampled by version -1"):
        token_lag(np.array([-1], np.int32), np.ones(1, np.bool_), np.array([0, 1]), np.array(3))
