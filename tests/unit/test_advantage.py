"""Group-relative advantage: the reference values, and the cases that other frameworks got wrong."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hops.advantage import grpo


def advantages(
    scores: list[float | None],
    uid: list[int] | None = None,
    trajectory: list[int] | None = None,
    **options: Any,
) -> list[float]:
    """One token a leaf."""
    n = len(scores)
    return grpo(
        np.array([0 if s is None else s for s in scores], np.float32),
        np.array([s is not None for s in scores]),
        np.array(uid or [0] * n),
        np.array(trajectory or range(n)),
        np.ones(n, np.bool_),
        np.arange(n + 1),
        **options,
    ).tolist()


def test_reference_values() -> None:
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.499997, *[-0.499999] * 3], abs=1e-6)
    assert advantages([1, 0, 0, 0], norm_by_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_a1_groups_are_formed_by_uid() -> None:
    assert advantages([1, 5, 3], uid=[7, 8, 7]) == pytest.approx([-0.7071, 0, 0.7071], abs=1e-4)


def test_a2_a_group_of_equal_scores_is_exactly_zero_between_others_of_other_sizes() -> None:
    got = advantages([1, 2, 3, 4, 5, 5, 5, 1, 0, 0, 0], uid=[0] * 4 + [1] * 3 + [2] * 4)
    assert got[4:7] == [0, 0, 0]
    assert all(got[:4])
    assert got[7:] == pytest.approx([1.499997, *[-0.499999] * 3], abs=1e-6)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a5_a_group_of_one_is_zero(norm_by_std: bool) -> None:
    assert advantages([5], norm_by_std=norm_by_std) == [0]
    assert advantages([5, 5, 1], uid=[0, 1, 1])[0] == 0


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a6_scores_that_differ_by_rounding_are_exactly_zero(norm_by_std: bool) -> None:
    assert advantages([0.1 + 0.2, 0.3], norm_by_std=norm_by_std) == [0, 0]
    # in float32 a third summed up is off by more than in float64
    third = float(sum([np.float32(1 / 3)] * 3, np.float32(0)))
    assert advantages(
        [third, np.nextafter(np.float32(1), np.float32(2)).item()], norm_by_std=norm_by_std
    ) == [0, 0]
    assert advantages([1000.0001, 1000.0], norm_by_std=norm_by_std) == [0, 0]


def test_a7_a_missing_score_is_left_out() -> None:
    with_gap = advantages([1, None, 0, 0])
    assert with_gap[1] == 0
    assert [with_gap[0], *with_gap[2:]] == advantages([1, 0, 0])
    assert advantages([None, None]) == [0, 0]
    assert advantages([3, None]) == [0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a8_a_score_that_is_not_finite_names_the_uid(bad: float) -> None:
    with pytest.raises(ValueError, match=r"uid 42: score .* is not finite"):
        advantages([1, bad], uid=[41, 42])


def test_a9_two_rows_with_the_same_prompt_are_two_groups() -> None:
    assert advantages([1, 1, 0, 0], uid=[1, 1, 2, 2]) == [0, 0, 0, 0]


def test_a11_observation_tokens_get_nothing() -> None:
    got = grpo(
        np.array([1, 0], np.float32), np.ones(2, np.bool_), np.array([0, 0]), np.array([0, 1]),
        np.array([0, 1, 0, 1, 0, 1], np.bool_), np.array([0, 4, 6]),
    )  # fmt: skip
    assert got.dtype == np.float32
    assert got[[0, 2, 4]].tolist() == [0, 0, 0]
    assert got[1] == got[3] == -got[5] > 0


def test_a_trajectory_counts_once_however_many_leaves_it_has() -> None:
    got = advantages([1, 1, 1, 0], trajectory=[5, 5, 5, 6])
    assert got[0] == got[1] == got[2] == pytest.approx(advantages([1, 0])[0])
    assert got[3] == pytest.approx(advantages([1, 0])[1])


GROUPS = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.floats(-100, 100, width=32)), min_size=1, max_size=24
)


@given(GROUPS, st.booleans())
def test_advantages_of_a_group_sum_to_zero(leaves: list[tuple[int, float | None]], norm_by_std: bool) -> None:
    uid, scores = [u for u, _ in leaves], [s for _, s in leaves]
    got = np.array(advantages(scores, uid, norm_by_std=norm_by_std), np.float64)
    for one in set(uid):
        assert abs(got[np.array(uid) == one].sum()) < (1e-4 if norm_by_std else 1e-2)


@given(GROUPS, st.randoms())
def test_advantages_do_not_depend_on_the_order_of_rows(
    leaves: list[tuple[int, float | None]], random: Any
) -> None:
    order = list(range(len(leaves)))
    random.shuffle(order)
    straight = advantages([s for _, s in leaves], [u for u, _ in leaves])
    shuffled = advantages([leaves[i][1] for i in order], [leaves[i][0] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-5)
