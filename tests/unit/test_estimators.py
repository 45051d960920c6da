"""Estimators against their published formulas, written out here in float64, and what must hold of all of them."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph.passes.pipeline import load
from hops.advantage import (
    by_group,
    gae,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    pkpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from tests.runtime.harness import TOY

Vector = np.ndarray[Any, np.dtype[np.float64]]


def of(hop: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A group-relative hop with its options: (scores, uid, trajectory, mask, offsets) → Advantages."""

    def call(scores: Sequence[float | None], *ports: Any) -> Any:
        score = np.array([0 if s is None else s for s in scores], np.float32)
        return hop(score, np.array([s is not None for s in scores]), *ports, **options)

    call.__name__ = hop.__name__
    return call


GROUPED = [
    of(grpo),
    of(grpo, norm_by_std=False),
    of(rloo),
    of(opo),
    of(maxrl),
    of(pkpo, samples=8, k=2),
    of(pass_at_k, samples=8, k=2),
    of(reinforce_pp_baseline),
]
every = pytest.mark.parametrize("estimator", GROUPED, ids=lambda e: e.__name__)


def a_leaf(
    estimator: Any, scores: Sequence[float | None], uid: Sequence[int], lengths: Sequence[int] = ()
) -> Vector:
    """One value a leaf, each a trajectory of its own with `lengths` sampled tokens, one by default."""
    bounds = np.cumsum([0, *(lengths or [1] * len(scores))])
    got = estimator(scores, np.array(uid), np.arange(len(scores)), np.ones(bounds[-1], np.bool_), bounds)
    return np.array(got.out[bounds[:-1]], np.float64)


# --- group-relative: the cases ---------------------------------------------------------------


@every
def test_groups_are_formed_by_uid(estimator: Any) -> None:
    """A1, A9"""
    got = a_leaf(estimator, [1, 1, 0, 0, 0, 0], [7, 8, 7, 8, 7, 8])
    assert got[:2].tolist() == [got[0]] * 2
    assert got[0] > 0
    assert not a_leaf(estimator, [1, 1, 0, 0], [1, 1, 2, 2]).any()


@every
def test_what_has_nothing_to_compare_is_exactly_zero(estimator: Any) -> None:
    """A2, A5, A6, A7: an equal group between others, one alone, rounding, no score."""
    equal, alone, noise, none = [5.0] * 3, [3.0], [0.1 + 0.2, 0.3], [None, None]
    scores = [1, 2, 3, 4, *equal, 1, 0, 0, 0, *alone, *noise, *none]
    uid = [0] * 4 + [1] * 3 + [2] * 4 + [3] + [4] * 2 + [5] * 2
    got = a_leaf(estimator, scores, uid)
    assert not got[4:7].any()
    assert not got[11:].any()
    assert got[7] > 0


@every
def test_a_missing_score_changes_no_sibling(estimator: Any) -> None:
    """A7"""
    with_gap = a_leaf(estimator, [1, None, 0, 0, 0.5], [0] * 5)
    assert with_gap[1] == 0
    assert with_gap[[0, 2, 3, 4]] == pytest.approx(a_leaf(estimator, [1, 0, 0, 0.5], [0] * 4))


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_not_finite_names_its_uid(estimator: Any, bad: float) -> None:
    """A8"""
    with pytest.raises(ValueError, match=r"uid 42: score .* is not finite"):
        a_leaf(estimator, [1, bad, 0], [41, 42, 42])


@every
def test_observations_get_nothing_and_an_empty_response_still_counts(estimator: Any) -> None:
    """A11, R1: leaves of a prompt token each; the first has two samples around an observation, the last has none."""
    mask = np.array([0, 1, 0, 1, 0, 1, 0], np.bool_)
    got = estimator([1, 0, 1], np.zeros(3, np.int64), np.arange(3), mask, np.array([0, 4, 6, 7])).out
    assert not got[~mask].any()
    assert got[1] == got[3] >= 0 >= got[5]
    without = a_leaf(estimator, [1, 0], [0, 0], lengths=[2, 1])
    # opo weighs it by its length, of three with two right two are always right, and whitening undoes the shift
    if estimator.__name__ not in ("opo", "pass_at_k", "reinforce_pp_baseline"):
        assert [got[1], got[5]] != pytest.approx(without.tolist())


@pytest.mark.parametrize(
    "estimator",
    [e for e in GROUPED if e.__name__ not in ("opo", "reinforce_pp_baseline")],
    ids=lambda e: e.__name__,
)
def test_withheld_members_still_shape_what_the_others_get(estimator: Any) -> None:
    """A10: of a group of five two are too old to be trained, and the other three get what they would have got."""
    scores = [1.0, 0.0, 0.5, 0.0, 1.0]
    whole = a_leaf(estimator, scores, [0] * 5)
    late = np.array([*scores[3:], 9.0], np.float32), np.array([0, 0, 5])
    got = estimator(
        scores[:3], np.zeros(3, np.int64), np.arange(3), np.ones(3, np.bool_), np.arange(4), *late
    )
    assert got.out == pytest.approx(whole[:3])
    assert got.metrics["groups"] == 1


LEAVES = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.floats(0, 100, width=16), st.integers(0, 4)),
    min_size=1,
    max_size=24,
)
any_estimator = st.sampled_from(GROUPED)


def packed(leaves: Sequence[tuple[int, float | None, int]], apart: bool, estimator: Any) -> list[float]:
    """The advantage of each sampled token, trajectory by trajectory; apart: each token in a leaf of its own."""
    parts = [1] * 0
    owner = []
    for i, (_, _, length) in enumerate(leaves):
        pieces = [1] * length if apart and length else [length]
        parts += pieces
        owner += [i] * len(pieces)
    bounds = np.cumsum([0, *parts])
    got = estimator(
        [leaves[i][1] for i in owner], np.array([leaves[i][0] for i in owner], np.int64), np.array(owner),
        np.ones(bounds[-1], np.bool_), bounds,
    )  # fmt: skip
    return [float(x) for x in got.out]


@given(LEAVES, any_estimator)
def test_how_a_trajectory_is_split_into_leaves_changes_nothing(leaves: Any, estimator: Any) -> None:
    assert packed(leaves, True, estimator) == pytest.approx(
        packed(leaves, False, estimator), rel=1e-5, abs=1e-6
    )


@given(LEAVES, any_estimator, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(leaves: Any, estimator: Any, random: Any) -> None:
    uid, scores = [u for u, _, _ in leaves], [s for _, s, _ in leaves]
    lengths = [n + 1 for _, _, n in leaves]
    order = list(range(len(leaves)))
    random.shuffle(order)
    straight = a_leaf(estimator, scores, uid, lengths)
    shuffled = a_leaf(
        estimator, [scores[i] for i in order], [uid[i] for i in order], [lengths[i] for i in order]
    )
    assert shuffled == pytest.approx(straight[order], rel=1e-4, abs=1e-5)


@given(
    st.lists(st.integers(0, 64), min_size=2, max_size=9),
    st.integers(1, 64),
    st.sampled_from([e for e in GROUPED if e.__name__ not in ("maxrl", "pass_at_k")]),
)
def test_a_constant_added_to_all_scores_changes_nothing(scores: Any, more: int, estimator: Any) -> None:
    """But for maxrl and pass@k, for which zero is the score of a failure."""
    uid = [0] * len(scores)
    plain, moved = a_leaf(estimator, scores, uid), a_leaf(estimator, [s + more for s in scores], uid)
    assert moved == pytest.approx(plain, rel=1e-4, abs=1e-4)


# --- group-relative: the formulas ------------------------------------------------------------

SCORES = [0.0, 1.0, 0.25, 1.0, 0.5, 0.0, 1.0, 0.0]
UID = [3, 3, 5, 5, 3, 3, 5, 5]
LENGTHS = [4, 1, 7, 2, 5, 3, 2, 6]


def by_uid(formula: Callable[[Vector], Vector]) -> Vector:
    out, uid, scores = np.zeros(len(SCORES)), np.array(UID), np.array(SCORES)
    for one in set(UID):
        out[uid == one] = formula(scores[uid == one])
    return out


def test_grpo_is_trl_s_and_verl_s() -> None:
    """TRL: (r − mean) / (std + 1e-4), torch's sample std; verl: epsilon 1e-6."""
    trl = by_uid(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4))
    assert a_leaf(of(grpo, eps=1e-4), SCORES, UID) == pytest.approx(trl, abs=1e-6)
    verl = by_uid(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6))
    assert a_leaf(of(grpo), SCORES, UID) == pytest.approx(verl, abs=1e-6)


def test_rloo_is_trl_s_and_verl_s() -> None:
    """verl: r·n/(n − 1) − mean·n/(n − 1); TRL: r − (Σ r − r)/(n − 1)."""
    verl = by_uid(lambda r: r * len(r) / (len(r) - 1) - r.mean() * len(r) / (len(r) - 1))
    trl = by_uid(lambda r: r - (r.sum() - r) / (len(r) - 1))
    assert verl == pytest.approx(trl)
    assert a_leaf(of(rloo), SCORES, UID) == pytest.approx(verl, abs=1e-6)


def test_maxrl_divides_by_the_share_of_successes() -> None:
    assert a_leaf(of(maxrl), [1, 0, 0, 0], [0] * 4).tolist() == [3, -1, -1, -1]
    assert a_leaf(of(maxrl), SCORES, UID) == pytest.approx(by_uid(lambda r: (r - r.mean()) / r.mean()))
    with pytest.raises(ValueError, match=r"uid 9: score -1.0 is below 0, and maxrl divides by the mean"):
        a_leaf(of(maxrl), [1, -1], [9, 9])


def test_pkpo_is_its_sum_over_sets() -> None:
    """Equation 33 of arXiv 2505.15201, as a mean over samples."""

    def by_sets(g: Vector, k: int) -> Vector:
        n = len(g)
        out = np.zeros(n)
        for chosen in itertools.combinations(range(n), k):
            for i in chosen:
                out[i] += max(g[list(chosen)]) - max(g[j] for j in chosen if j != i)
        return out * n / len(list(itertools.combinations(range(n), k)))

    scores = [0.5, 0.0, 1.0, 1.0, 0.25, -2.0]
    for k in range(2, 7):
        right = by_sets(np.array(scores), k)
        assert a_leaf(of(pkpo, samples=6, k=k), scores, [0] * 6) == pytest.approx(right, abs=1e-6)
    assert not a_leaf(
        of(pkpo, samples=6, k=3), [1, 0], [0, 0]
    ).any()  # two scores say nothing of the best of 3


def test_pass_at_k_is_its_mean_over_sets() -> None:
    """arXiv 2508.10751, section 2.4: mean and deviation of the best of k over all sets, and over those that hold i."""
    scores = np.array([1.0, 0, 0, 1, 0, 0.5])
    right = scores >= 1
    for k in range(1, 5):
        sets = list(itertools.combinations(range(6), k))
        passed = np.array([right[list(chosen)].any() for chosen in sets])
        holding = [np.mean([p for p, s in zip(passed, sets, strict=True) if i in s]) for i in range(6)]
        want = (np.array(holding) - passed.mean()) / passed.std()
        assert a_leaf(of(pass_at_k, samples=6, k=k), scores.tolist(), [0] * 6) == pytest.approx(
            want, abs=1e-6
        )
    assert not a_leaf(
        of(pass_at_k, samples=6, k=5), scores.tolist(), [0] * 6
    ).any()  # one of five is always right
    one = a_leaf(of(pass_at_k, samples=4, k=1), [1, 0, 0, 0], [0] * 4)
    assert one == pytest.approx(np.array([1, 0, 0, 0] - np.mean([1, 0, 0, 0])) / np.std([1, 0, 0, 0]))


@pytest.mark.parametrize(
    ("estimator", "objective"),
    [
        (of(rloo), lambda p, n: p),
        (of(maxrl), lambda p, n: sum((1 - (1 - p) ** k) / k for k in range(1, n))),
        (of(pkpo, samples=5, k=2), lambda p, n: 1 - (1 - p) ** 2),
        (of(pkpo, samples=5, k=4), lambda p, n: 1 - (1 - p) ** 4),
    ],
)
def test_what_an_estimator_is_an_unbiased_gradient_of(estimator: Any, objective: Any) -> None:
    """A policy that is right with chance p = σ(θ): the expectation over all outcomes, against a finite difference."""
    n, p = 5, 0.3
    expected = 0.0
    for outcome in itertools.product([0, 1], repeat=n):
        chance = np.prod([p if r else 1 - p for r in outcome])
        slope = np.array([r - p for r in outcome])  # d log π(r) / dθ
        expected += chance * (a_leaf(estimator, list(outcome), [0] * n) * slope).mean()
    above, below = (1 / (1 + np.exp(-(np.log(p / (1 - p)) + d))) for d in (1e-5, -1e-5))
    assert expected == pytest.approx((objective(above, n) - objective(below, n)) / 2e-5, rel=1e-5)


def test_options_that_no_group_can_meet_are_refused() -> None:
    for name, told in (("pkpo", "k must be at least 2, not 1"), ("pass_at_k", "k must be at least 1, not 0")):
        k = told[-1]
        over = [f"hops.advantage.use=hops.advantage.{name}", f"hops.advantage.with={{k: {k}}}"]
        (found,) = load(TOY, over).diagnostics
        assert told in found.message
        assert load(TOY, [over[0], "hops.advantage.with={k: 3}"]).diagnostics == []
    for hop in (pkpo, pass_at_k):
        with pytest.raises(ValueError, match="best of k = 9 can't be told from 8 samples"):
            a_leaf(of(hop, samples=8, k=9), [1, 0], [0, 0])


def test_reinforce_pp_baseline_is_verl_s() -> None:
    """r − the mean of its group, on each token, then (x − mean) · rsqrt(var + 1e-8) over the batch's tokens (n − 1)."""
    x = np.repeat(by_uid(lambda r: r - r.mean()), LENGTHS)
    right = (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    got = a_leaf(of(reinforce_pp_baseline), SCORES, UID, LENGTHS)
    assert np.repeat(got, LENGTHS) == pytest.approx(right, abs=1e-6)


def test_what_the_rewards_of_a_batch_say_by_group() -> None:
    scores, uid = [1, 1, 1, 0, -1, 0, 0.5, 0, 2, 0], [0, 0, 1, 1, 2, 2, 3, 3, 4, 5]
    scored = np.ones(10, np.bool_)
    scored[-1] = False
    got = by_group(np.array(scores, np.float32), scored, np.array(uid), np.arange(10)).metrics
    assert got == pytest.approx(
        {
            "groups": 6, "alone": 2 / 6, "equal": 1 / 6, "all_right": 2 / 5, "all_wrong": 1 / 5, "mixed": 2 / 5,
            "best": (1 + 1 + 0 + 0.5 + 2) / 5, "spread": (0 + 2 * 0.5**0.5 + 0.5**0.5 / 2) / 4,
        }
    )  # fmt: skip
    nothing = by_group(np.zeros(2, np.float32), np.zeros(2, np.bool_), np.array([0, 1]), np.arange(2)).metrics
    assert nothing == {"groups": 2, "alone": 1, "equal": 0}


# --- token by token --------------------------------------------------------------------------


class Batch:
    """Leaves as (mask, rewards, values) of equal lengths."""

    def __init__(self, *leaves: tuple[Sequence[int], Sequence[float], Sequence[float]]) -> None:
        self.masks = [np.array(mask, np.bool_) for mask, _, _ in leaves]
        self.rewards = [np.array(rewards, np.float64) for _, rewards, _ in leaves]
        self.values = [np.array(values, np.float64) for _, _, values in leaves]
        self.mask = np.concatenate(self.masks)
        self.offsets = np.cumsum([0, *map(len, self.masks)])
        self.scored = np.ones(len(leaves), np.bool_)
        self.uid = 40 + np.arange(len(leaves))
        self.trajectory = np.arange(len(leaves))
        self.sampled: Any = None

    @property
    def _of(self) -> tuple[Any, ...]:
        return self.scored, self.uid, self.trajectory, self.mask, self.offsets, self.sampled

    def reinforce(self, **options: Any) -> Any:
        rewards = np.concatenate(self.rewards).astype(np.float32)
        return reinforce_pp(rewards, *self._of, **options)

    def gae(self, **options: Any) -> Any:
        rewards, values = (np.concatenate(x).astype(np.float32) for x in (self.rewards, self.values))
        return gae(rewards, values, *self._of, **options)


def verl_returns(rewards: Vector, mask: Any, gamma: float) -> Vector:
    """G over a row from its end; a masked token hands on what came."""
    out, running = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * running if mask[t] else running
        out[t] = running
    return out


def verl_gae(rewards: Vector, values: Vector, mask: Any, gamma: float, lam: float) -> Vector:
    """core_algos.compute_gae_advantage_return: next value and last advantage skip masked tokens."""
    out, value, last = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * value - values[t]
        now = delta + gamma * lam * last
        value = values[t] * mask[t] + (1 - mask[t]) * value
        last = now * mask[t] + (1 - mask[t]) * last
        out[t] = last
    return out


def masked_whiten(x: Vector, mask: Any) -> Vector:
    at = x[mask]
    return np.where(mask, (x - at.mean()) / np.sqrt(at.var(ddof=1) + 1e-8), 0)


TWO = Batch(
    ([0, 1, 1, 0, 0, 1], [0, 0, 0.5, 0, 0, 1], [9, 0.2, 0.4, 9, 9, 0.7]),
    ([0, 0, 1, 1], [0, 0, 0, -1], [9, 9, 0.1, -0.3]),
)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp_carries_returns_over_tokens_between_turns(gamma: float) -> None:
    """A11: the return passes the observation between the turns, which gets nothing."""
    returns = [verl_returns(r, m, gamma) for r, m in zip(TWO.rewards, TWO.masks, strict=True)]
    got = TWO.reinforce(gamma=gamma)
    assert got.advantages == pytest.approx(masked_whiten(np.concatenate(returns), TWO.mask), abs=1e-6)
    assert got.metrics["return"] == pytest.approx(np.concatenate(returns)[TWO.mask].mean())
    if gamma == 1:
        assert got.advantages[1] == got.advantages[2] > got.advantages[5]  # 1.5, 1.5 | 1: no credit is lost


@pytest.mark.parametrize(("gamma", "lam"), [(1, 1), (0.9, 0.5), (1, 0), (0, 1)])
def test_gae_is_verl_s(gamma: float, lam: float) -> None:
    rows = zip(TWO.rewards, TWO.values, TWO.masks, strict=True)
    plain = np.concatenate([verl_gae(r, v, m, gamma, lam) for r, v, m in rows])
    values = np.concatenate(TWO.values)
    got, white = TWO.gae(gamma=gamma, lam=lam, whitened=False), TWO.gae(gamma=gamma, lam=lam)
    assert got.advantages == pytest.approx(np.where(TWO.mask, plain, 0), abs=1e-6)
    assert got.returns == pytest.approx(np.where(TWO.mask, plain + values, 0), abs=1e-6)
    assert white.advantages == pytest.approx(masked_whiten(plain, TWO.mask), abs=1e-6)
    assert white.returns.tolist() == got.returns.tolist()


def test_gae_with_lam_one_is_return_less_value_and_with_zero_the_step() -> None:
    """The two ends of equation 16 of arXiv 1506.02438."""
    values, rewards = np.array([0.5, -0.25, 2.0]), np.array([1.0, 0.0, 3.0])
    batch = Batch(([1, 1, 1], rewards, values))
    returns = np.array([4.0, 3.0, 3.0])
    assert batch.gae(whitened=False).advantages == pytest.approx(returns - values)
    step = rewards + np.array([-0.25, 2.0, 0]) - values
    assert batch.gae(lam=0, whitened=False).advantages == pytest.approx(step)


def test_a_reward_behind_the_last_sampled_token_is_not_lost() -> None:
    """R2: it counts for that token; and one on an observation between turns for the token before it."""
    carried = Batch(([0, 1, 0, 1, 0], [0, 0, 2, 0, 1], [0] * 5), ([0, 1], [0, 0], [0, 0]))
    on_tokens = Batch(([0, 1, 0, 1, 0], [0, 2, 0, 1, 0], [0] * 5), ([0, 1], [0, 0], [0, 0]))
    assert carried.gae(whitened=False).returns.tolist() == [0, 3, 0, 1, 0, 0, 0]
    for name in ("reinforce", "gae"):
        one, other = (getattr(batch, name)(gamma=0.5).advantages for batch in (carried, on_tokens))
        assert one.tolist() == other.tolist()


def test_a_response_without_a_token_gives_its_reward_to_nobody() -> None:
    """R1: no index −1, no neighbour's token."""
    batch = Batch(([0, 0], [0, 10], [0, 0]), ([0, 1], [0, 1], [0, 0]), ([0, 1], [0, 3], [0, 0]))
    assert batch.gae(whitened=False).advantages.tolist() == [0, 0, 0, 1, 0, 3]
    assert batch.reinforce().advantages[[3, 5]] == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_a_leaf_without_a_score_teaches_neither_actor_nor_critic() -> None:
    """A7"""
    batch = Batch(([1, 1], [0, 1], [0.5, 0.25]), ([1], [0], [0.75]), ([1], [0], [0.5]))
    batch.scored[1] = False
    got = batch.gae()
    assert got.advantages[2] == 0
    assert got.returns[2] == 0.75
    alone = Batch(([1, 1], [0, 1], [0.5, 0.25]), ([1], [0], [0.5]))
    assert got.advantages[[0, 1, 3]].tolist() == alone.gae().advantages.tolist()
    assert got.metrics == alone.gae().metrics
    assert batch.reinforce().advantages[[0, 1, 3]].tolist() == alone.reinforce().advantages.tolist()
    batch.scored[:] = False
    assert batch.gae().metrics == batch.reinforce().metrics == {}
    assert not batch.gae().advantages.any()


def test_advantages_that_differ_by_rounding_are_exactly_zero_when_whitened() -> None:
    """A6"""
    batch = Batch(([1], [0.1 + 0.2], [0]), ([1], [0.3], [0]))
    assert not batch.reinforce().advantages.any()
    assert not batch.gae().advantages.any()
    assert not Batch(([1], [3], [0])).reinforce().advantages.any()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_reward_or_value_that_is_not_finite_names_its_uid(bad: float) -> None:
    """A8"""
    batch = Batch(([1, 1], [0, 1], [0, 0]), ([1, 1], [bad, 0], [0, 0]))
    with pytest.raises(ValueError, match=r"uid 41: reward .* is not finite"):
        batch.reinforce()
    with pytest.raises(ValueError, match=r"uid 41: reward .* is not finite"):
        batch.gae()
    with pytest.raises(ValueError, match=r"uid 40: value .* is not finite"):
        Batch(([1, 0], [0, 1], [bad, bad])).gae()
    assert Batch(([0, 1], [0, 1], [bad, 0])).gae().returns.tolist() == [
        0,
        1,
    ]  # no value before a sampled token


def fork() -> Batch:
    """Two trajectories of two turns, the second turn in a leaf of its own; the first one's is rewarded at its end."""
    first, second = [0, 0, 1, 1], [0, 0, 0, 1, 1]
    nothing, right = [0.0] * 4, [0.0] * 4 + [1.0]
    batch = Batch(
        *((first, nothing, nothing), (second, right, right)),
        *((first, nothing, nothing), (second, [*nothing, 0.0], [*nothing, 0.0])),
    )
    batch.uid[:], batch.trajectory[:] = 40, [7, 7, 9, 9]
    batch.sampled = np.array([-1, -1, 0, 1, -1, -1, -1, 2, 3] * 2, np.int32)
    return batch


def test_every_turn_is_credited_with_what_the_last_one_earned_also_in_another_leaf() -> None:
    batch = fork()
    assert batch.gae(whitened=False).returns[batch.mask].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert batch.gae(gamma=0.5, whitened=False).returns[batch.mask][:4].tolist() == [0.125, 0.25, 0.5, 1]
    got = batch.reinforce().advantages[batch.mask]
    assert got[0] > 0 > got[4]
    assert got.tolist() == [got[0]] * 4 + [got[4]] * 4


def test_a_fork_gives_what_its_turns_would_give_in_one_leaf_whatever_order_its_leaves_have() -> None:
    whole = Batch(([1, 1, 1, 1], [1, 2, 3, 4], [0.5, 0.25, 1, 2]))
    forked = Batch(([0, 1, 1], [0, 2, 3], [9, 0.25, 1]), ([1, 0, 0, 1], [1, 0, 0, 4], [0.5, 9, 9, 2]))
    forked.uid[:], forked.trajectory[:] = 40, 3
    forked.sampled = np.array([0, 1, 2, 0, 1, 2, 3], np.int32)
    want = whole.gae(gamma=0.5, lam=0.75, whitened=False).advantages
    assert forked.gae(gamma=0.5, lam=0.75, whitened=False).advantages[[3, 1, 2, 6]].tolist() == want.tolist()
    want = whole.reinforce(gamma=0.5).advantages
    assert forked.reinforce(gamma=0.5).advantages[[3, 1, 2, 6]].tolist() == want.tolist()


def test_a_fork_of_which_nothing_says_what_was_sampled_first_is_refused() -> None:
    batch = fork()
    batch.sampled = None
    for estimate in (batch.gae, batch.reinforce):
        with pytest.raises(ValueError, match=r"trajectory 7 has 2 leaves, .*; add sampled: batch under in:"):
            estimate()
    # A leaf of which nothing is trained is no link of the chain.
    batch.mask[[2, 3, 11, 12]] = False
    assert batch.gae(whitened=False).returns[batch.mask].tolist() == [1, 1, 0, 0]


ROW = st.lists(st.tuples(st.booleans(), st.integers(-8, 8), st.integers(-8, 8)), min_size=1, max_size=9)


@settings(max_examples=60)
@given(
    st.lists(ROW, min_size=1, max_size=6), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])
)
def test_chains_of_any_lengths_are_those_of_each_row_alone(rows: Any, gamma: float, lam: float) -> None:
    leaves = [tuple(zip(*row, strict=True)) for row in rows]
    got = Batch(*leaves).gae(gamma=gamma, lam=lam, whitened=False)
    apart = [Batch(leaf).gae(gamma=gamma, lam=lam, whitened=False) for leaf in leaves]
    assert got.advantages.tolist() == np.concatenate([one.advantages for one in apart]).tolist()
    returns = [verl_returns(b.rewards[0] * b.mask, b.mask, gamma) for b in map(Batch, leaves)]
    plain = np.concatenate(returns)[np.concatenate([np.array(leaf[0], np.bool_) for leaf in leaves])]
    on_sampled = Batch(*[(m, np.array(r) * np.array(m), v) for m, r, v in leaves])
    white = on_sampled.reinforce(gamma=gamma).advantages[on_sampled.mask]
    if len(plain) > 1 and np.ptp(plain) > 0:
        assert white == pytest.approx((plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8), abs=1e-5)
    else:
        assert not white.any()


def test_a_graph_with_a_token_by_token_estimator_compiles() -> None:
    graph = str(Path(__file__).parents[2] / "graphs" / "quickstart.yaml")
    columns = (
        "token_level_rewards: reward, scored: reward, uid: batch, trajectory: batch, response_mask: batch, "
        "leaf_offsets: batch"
    )
    use = f"use: hops.advantage.reinforce_pp, in: {{{columns}}}"
    assert load(graph, [f"hops.advantage={{{use}}}"]).diagnostics == []
    (bad,) = load(graph, [f"hops.advantage={{{use}, with: {{gamma: 1.5}}}}"]).diagnostics
    assert "gamma must be in [0, 1], not 1.5" in bad.message
    turns = f"{use.replace(': reward', ': batch').replace('{', '{sampled: batch, ', 1)}"
    assert load(graph.replace("quickstart", "multiturn"), [f"hops.advantage={{{turns}}}"]).diagnostics == []
