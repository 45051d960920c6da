"""Estimators for what a prompt's samples achieve together: hard prompts weigh more, or the best of k is trained."""

from __future__ import annotations

from math import comb
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Float32, Int64

from flowgraph import Array, Dim, hop
from hops.advantage.groups import (
    TOGETHER,
    Advantages,
    Group,
    Sampled,
    Vector,
    WithheldScores,
    WithheldUids,
    estimate_groups,
)


@hop(owner="trainer", lifetime="step", needs=TOGETHER)
def maxrl(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    withheld_score: WithheldScores | None = None,
    withheld_uid: WithheldUids | None = None,
) -> Advantages:
    """(s_i − mean) / mean within each group; a group whose samples all failed gives 0.

    Source: MaxRL (arXiv 2602.02710). With scores of 0 and 1 the mean of A_i ∇log π_i over n samples is an unbiased
    gradient of Σ_{k < n} pass@k / k: the log-likelihood of success, expanded and cut off; its first term is rloo's.

    Ports and errors are those of `grpo`; it raises ValueError naming the uid for a score below 0.
    """
    below = np.flatnonzero(scored & (score < 0))
    if len(below):
        raise ValueError(
            f"uid {uid[below[0]]}: score {score[below[0]]} is below 0, and maxrl divides by the mean of a group;"
            " give scores in [0, 1], or use grpo"
        )
    return estimate_groups(
        lambda g: (g.own_R - g.score_M.mean()) / g.score_M.mean(),
        *(score, scored, uid, trajectory, response_mask, leaf_offsets, withheld_score, withheld_uid),
    )


def _check_pkpo(*, k: int, samples: int | None = None) -> None:
    if k < 2:
        raise ValueError(f"k must be at least 2, not {k}; for k = 1 use rloo")
    _enough(k, samples)


def _check_pass_at_k(*, k: int, right: float = 1.0, samples: int | None = None) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    _enough(k, samples)


@hop(owner="trainer", lifetime="step", validate=_check_pkpo, needs=TOGETHER)
def pkpo(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    withheld_score: WithheldScores | None = None,
    withheld_uid: WithheldUids | None = None,
    *,
    samples: Annotated[int, Dim("sample")],
    k: int,
) -> Advantages:
    """n / C(n, k) · Σ (max s_I − max s_{I∖i}) over the sets I of k samples that hold i: how often, and by how much, i
    is the best of k. Never negative.

    Source: Pass@K Policy Optimization (arXiv 2505.15201), equation 33, the estimator s^(loo-1), for any scores. Its sum
    over samples is an unbiased gradient of the expected best of k; the n turns the sum into the mean that the other
    estimators stand for.

    Computed as k · Σ_j C(j, k−2) / C(n−1, k−1) · max(0, s_i − s_(j)), with s_(j) the others in ascending order, j from
    0: the factor is the share of sets of k − 1 others whose best is the j-th. A group of fewer than k scores gives 0.
    Ports and errors are those of `grpo`; it raises ValueError for k above `dims.sample`.
    """
    _enough(k, samples)
    return estimate_groups(
        lambda g: _pkpo(g.score_M, k)[g.member_R],
        *(score, scored, uid, trajectory, response_mask, leaf_offsets, withheld_score, withheld_uid),
    )


def _pkpo(score_M: Vector, k: int) -> Vector:
    n = len(score_M)
    if n < k:
        return np.zeros(n)
    best_J = np.array([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n - 1)])
    others_MJ = np.array([np.sort(np.delete(score_M, i)) for i in range(n)])
    above_M: Vector = np.maximum(score_M[:, None] - others_MJ, 0) @ best_J
    return k * above_M


@hop(owner="trainer", lifetime="step", validate=_check_pass_at_k, needs=TOGETHER)
def pass_at_k(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    withheld_score: WithheldScores | None = None,
    withheld_uid: WithheldUids | None = None,
    *,
    samples: Annotated[int, Dim("sample")],
    k: int,
    right: float = 1.0,
) -> Advantages:
    """(R_i − R) / √(R (1 − R)), with R the chance that of k samples of the group one is right, and R_i the same of k
    that hold sample i: 1 for a right one, 1 − C(m−1, k−1) / C(n−1, k−1) for one of the m wrong ones of n.

    R = 1 − C(m, k) / C(n, k). Source: Pass@k training (arXiv 2508.10751), section 2.4. With k = 1 it is grpo with the
    standard deviation of n instead of n − 1. Where R is 0 or 1 all of the group get 0.

    right: a score at least this is right, any other wrong. A group of fewer than k scores gives 0. Ports and errors are
    those of `grpo`; it raises ValueError for k above `dims.sample`.
    """
    _enough(k, samples)
    return estimate_groups(
        lambda g: _pass_at_k(g, k, right),
        *(score, scored, uid, trajectory, response_mask, leaf_offsets, withheld_score, withheld_uid),
    )


def _pass_at_k(group: Group, k: int, right: float) -> Vector:
    n, wrong = len(group.score_M), int((group.score_M < right).sum())
    out_R = np.zeros(len(group.own_R))
    if n < k or not 0 < comb(wrong, k) < comb(n, k):
        return out_R
    passed = 1 - comb(wrong, k) / comb(n, k)
    with_wrong = 1 - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)
    given_R = np.where(group.own_R >= right, 1.0, with_wrong)
    out_R[:] = (given_R - passed) / np.sqrt(passed * (1 - passed))
    return out_R


def _enough(k: int, samples: int | None) -> None:
    if samples is not None and k > samples:
        raise ValueError(
            f"the best of k = {k} can't be told from {samples} samples; lower k or raise dims.sample"
        )
