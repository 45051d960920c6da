"""Group-relative advantages: the reference values, and the cases that other frameworks got wrong (A1-A11, R1)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph import Tokens
from flowgraph.passes.pipeline import load
from hops.advantage import Advantages, grpo, opo, rloo
from hops.loss import policy_gradient
from tests.runtime.harness import TOY

ESTIMATORS = [grpo, rloo, opo]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


def estimate(
    scores: list[float | None],
    uid: list[int] | None = None,
    trajectory: list[int] | None = None,
    lengths: list[int] | None = None,
    estimator: Callable[..., Advantages] = grpo,
    **options: Any,
) -> Advantages:
    """Sampled tokens only: `lengths` of each leaf, one by default."""
    n = len(scores)
    bounds = np.cumsum([0, *(lengths or [1] * n)])
    return estimator(
        np.array([0 if s is None else s for s in scores], np.float32),
        np.array([s is not None for s in scores]),
        np.array(uid or [0] * n),
        np.array(trajectory or range(n)),
        np.ones(bounds[-1], np.bool_),
        bounds,
        **options,
    )


def advantages(scores: list[float | None], *args: Any, **options: Any) -> list[float]:
    """One value a leaf, none of them empty."""
    got = estimate(scores, *args, **options).out
    starts = np.cumsum([0, *(options.get("lengths") or [1] * len(scores))])[:-1]
    return got[starts].tolist()


def teaching(got: Advantages) -> tuple[float, float, float]:
    """How many groups there are, and the shares of them that teach nothing."""
    return got.metrics["groups"], got.metrics["alone"], got.metrics["equal"]


def withheld(scores: list[float], uid: list[int] | None = None, lengths: list[int] | None = None) -> Any:
    """The ports that tell of members which are not in the batch; `length` is opo's alone."""
    ports = {
        "withheld_score": np.array(scores, np.float32),
        "withheld_uid": np.array(uid or [0] * len(scores), np.int64),
    }
    return ports if lengths is None else ports | {"withheld_length": np.array(lengths, np.int64)}


def test_reference_values() -> None:
    one = [1, 0, 0, 0]
    assert advantages(one) == pytest.approx([1.499997, *[-0.499999] * 3], abs=1e-6)
    assert advantages(one, norm_by_std=False) == [0.75, -0.25, -0.25, -0.25]
    assert advantages(one, estimator=rloo) == pytest.approx([1, *[-0.333333] * 3], abs=1e-6)
    lengths = [10, 20, 30, 40]
    assert advantages(one, lengths=lengths, estimator=opo) == pytest.approx([0.9, *[-0.1] * 3], abs=1e-6)


@every_estimator
def test_groups_are_formed_by_uid(estimator: Any) -> None:
    """A1"""
    got = advantages([1, 5, 3], uid=[7, 8, 7], estimator=estimator)
    assert got[1] == 0
    assert got[2] == -got[0] > 0
    assert advantages([1, 3, 5], uid=[7, 7, 8]) == pytest.approx([-0.7071, 0.7071, 0], abs=1e-4)


@every_estimator
def test_a_group_of_equal_scores_is_exactly_zero_between_others_of_other_sizes(estimator: Any) -> None:
    """A2"""
    scores, uid = [1, 2, 3, 4, 5, 5, 5, 1, 0, 0, 0], [0] * 4 + [1] * 3 + [2] * 4
    got = estimate(scores, uid, estimator=estimator)
    assert got.out[4:7].tolist() == [0, 0, 0]
    assert got.out[:4].all()
    assert got.out[7:].tolist() == advantages([1, 0, 0, 0], estimator=estimator)
    assert teaching(got) == (3, 0, pytest.approx(1 / 3))


@every_estimator
def test_a_group_of_one_is_zero_and_counted(estimator: Any) -> None:
    """A5"""
    assert estimate([5], estimator=estimator).out.tolist() == [0]
    got = estimate([5, 5, 1], uid=[0, 1, 1], estimator=estimator)
    assert got.out[0] == 0
    assert teaching(got) == (2, 0.5, 0)
    assert advantages([5], norm_by_std=False) == [0]


@pytest.mark.parametrize(
    "options", [{}, {"norm_by_std": False}, {"estimator": rloo}, {"estimator": opo, "lengths": [3, 70]}]
)
def test_scores_that_differ_by_rounding_are_exactly_zero(options: Any) -> None:
    """A6"""
    assert advantages([0.1 + 0.2, 0.3], **options) == [0, 0]
    # in float32 a third summed up is off by more than in float64
    third = float(sum([np.float32(1 / 3)] * 3, np.float32(0)))
    assert advantages([third, np.nextafter(np.float32(1), np.float32(2)).item()], **options) == [0, 0]
    assert advantages([1000.0001, 1000.0], **options) == [0, 0]


@every_estimator
def test_a_missing_score_is_left_out(estimator: Any) -> None:
    """A7"""
    with_gap = advantages([1, None, 0, 0], estimator=estimator)
    assert with_gap[1] == 0
    assert [with_gap[0], *with_gap[2:]] == advantages([1, 0, 0], estimator=estimator)
    nothing = estimate([None, None], estimator=estimator)
    assert nothing.out.tolist() == [0, 0]
    assert nothing.metrics["alone"] == 1
    assert advantages([3, None], estimator=estimator) == [0, 0]


@every_estimator
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_names_the_uid(bad: float, estimator: Any) -> None:
    """A8"""
    with pytest.raises(ValueError, match=r"uid 42: score .* is not finite"):
        advantages([1, bad], uid=[41, 42], estimator=estimator)
    lengths = {"lengths": [1]} if estimator is opo else {}
    with pytest.raises(ValueError, match=r"uid 43: score .* is not finite"):
        advantages([1, 0], estimator=estimator, **withheld([bad], [43], **lengths))


@every_estimator
def test_two_rows_with_the_same_prompt_are_two_groups(estimator: Any) -> None:
    """A9"""
    assert advantages([1, 1, 0, 0], uid=[1, 1, 2, 2], estimator=estimator) == [0, 0, 0, 0]


@every_estimator
@pytest.mark.parametrize("stale", [1, 2, 3])
def test_withheld_members_still_shape_the_baseline(stale: int, estimator: Any) -> None:
    """A10: what is left of a group is compared with all of it, never with the survivors alone."""
    scores, lengths = [1.0, 0.0, 0.5, 0.0], [10, 20, 30, 40]
    whole = advantages(scores, lengths=lengths, estimator=estimator)
    kept = 4 - stale
    more = {"lengths": lengths[kept:]} if estimator is opo else {}
    ports = withheld([*scores[kept:], 9.0], [0] * stale + [5], **{k: [*v, 7] for k, v in more.items()})
    got = estimate(scores[:kept], lengths=lengths[:kept], estimator=estimator, **ports)
    assert got.out[np.cumsum([0, *lengths[: kept - 1]])].tolist() == pytest.approx(whole[:kept])
    assert len(got.out) == sum(lengths[:kept])
    assert teaching(got) == (1, 0, 0)  # a group of withheld members alone is none


def test_withheld_members_without_what_the_baseline_needs_are_refused() -> None:
    """A10"""
    with pytest.raises(ValueError, match=r"withheld members come without one; let stale members be dropped"):
        estimate([1, 0], estimator=opo, **withheld([1]))
    assert advantages([1, 0], estimator=opo, **withheld([])) == advantages([1, 0], estimator=opo)
    with pytest.raises(ValueError, match="1 withheld scores and 0 uids; wire both"):
        estimate([1, 0], withheld_score=np.ones(1, np.float32))


@every_estimator
def test_a_batch_that_withholds_gives_what_an_estimator_reads(estimator: Any) -> None:
    """A10, wired: and without a batch that withholds, `withheld` is a dim that no graph has to size."""
    name = f"hops.advantage.use=hops.advantage.{estimator.__name__}"
    assert load(TOY, [name]).diagnostics == []
    early = (
        "hops.reward.in={tokens: rollout, leaf_offsets: rollout, ground_truth: rollout}",
        "hops.buffer.in.trajectory=reward",
        "hops.dispatch.in.finished=reward",
        "hops.batch={use: hops.batch.withhold, in: {ready: buffer, score: buffer}}",
        "dims.withheld={mean: 0.5, max: 5}",
        "hops.advantage.in.withheld_score=batch",
        "hops.advantage.in.withheld_uid=batch",
    )
    lacks = ["FG110"] if estimator is opo else []  # the lengths, which this batch does not give
    assert [d.code for d in load(TOY, [name, *early]).diagnostics] == lacks
    unsized = load(TOY, [name, *(one for one in early if "dims" not in one)]).diagnostics
    assert sorted(d.code for d in unsized) == [*lacks, "FG204"]


@every_estimator
def test_observation_tokens_get_nothing(estimator: Any) -> None:
    """A11"""
    got = estimator(
        np.array([1, 0], np.float32), np.ones(2, np.bool_), np.array([0, 0]), np.array([0, 1]),
        np.array([0, 1, 0, 1, 0, 1], np.bool_), np.array([0, 4, 6]),
    ).out  # fmt: skip
    assert got.dtype == np.float32
    assert got[[0, 2, 4]].tolist() == [0, 0, 0]
    assert got[1] == got[3] > 0 > got[5]


def test_the_tokens_that_opo_weighs_by_are_the_sampled_ones() -> None:
    """A11: a long observation makes a trajectory no heavier, and its leaves count together."""
    got = opo(
        np.array([1, 0, 0], np.float32), np.ones(3, np.bool_), np.zeros(3, np.int64), np.array([0, 1, 1]),
        np.array([1, 0, 0, 0, 0, 1, 1, 1], np.bool_), np.array([0, 5, 6, 8]),
    ).out  # fmt: skip
    assert got.tolist() == [0.75, 0, 0, 0, 0, -0.25, -0.25, -0.25]


@every_estimator
def test_an_empty_response_counts_in_its_group_and_trains_nothing(estimator: Any) -> None:
    """R1: a reward of 10 for no token at all; the loss of its siblings is finite."""
    import torch

    mask = np.array([0, 0, 0, 1, 0, 1, 1], np.bool_)  # prompts of 2, 1, 1 tokens; responses of none, 1 and 2
    got = estimator(
        np.array([10, 1, 1], np.float32), np.ones(3, np.bool_), np.zeros(3, np.int64), np.arange(3),
        mask, np.array([0, 2, 4, 7]),
    ).out  # fmt: skip
    assert not got[~mask].any()
    if estimator is opo:  # by tokens the empty response weighs nothing
        assert not got.any()
    else:
        assert (got[mask] < 0).all()
        assert len(set(got[mask].tolist())) == 1
    logprobs = torch.full((int(mask.sum()),), -1.0)
    fields = {"advantages": torch.from_numpy(got[mask])}
    said = policy_gradient()(Tokens(logprobs, torch.zeros(3), fields, torch.tensor([0, 1, 1]), 2))
    assert torch.isfinite(said.loss).all()


@every_estimator
def test_a_trajectory_counts_once_however_many_leaves_it_has(estimator: Any) -> None:
    got = advantages([1, 1, 1, 0], trajectory=[5, 5, 5, 6], lengths=[1, 1, 1, 3], estimator=estimator)
    whole = advantages([1, 0], lengths=[3, 3], estimator=estimator)
    assert got == pytest.approx([whole[0]] * 3 + [whole[1]])


GROUPS = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.floats(-100, 100, width=32)), min_size=1, max_size=24
)


OPTIONS = st.sampled_from([{}, {"norm_by_std": False}, {"estimator": rloo}, {"estimator": opo}])


@given(GROUPS, OPTIONS)
def test_advantages_of_a_group_sum_to_zero(leaves: list[tuple[int, float | None]], options: Any) -> None:
    uid, scores = [u for u, _ in leaves], [s for _, s in leaves]
    got = np.array(advantages(scores, uid, **options), np.float64)
    for one in set(uid):
        assert abs(got[np.array(uid) == one].sum()) < (1e-2 if options else 1e-4)


@given(GROUPS, OPTIONS, st.randoms())
def test_advantages_do_not_depend_on_the_order_of_rows(
    leaves: list[tuple[int, float | None]], options: Any, random: Any
) -> None:
    order = list(range(len(leaves)))
    random.shuffle(order)
    straight = advantages([s for _, s in leaves], [u for u, _ in leaves], **options)
    shuffled = advantages([leaves[i][1] for i in order], [leaves[i][0] for i in order], **options)
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-5, rel=1e-5)
