"""Estimators that compare a trajectory with the other samples of its prompt; see groups.py for what they share."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Int64

from flowgraph import Array, hop
from hops.advantage.groups import (
    TOGETHER,
    Advantages,
    Groups,
    Sampled,
    WithheldScores,
    WithheldUids,
    estimate_groups,
    sampled_tokens,
    tile,
    whiten,
)

WITH_LENGTH = {
    "withheld_score": "withheld_length",
    "withheld_uid": "withheld_score",
    "withheld_length": "withheld_uid",
}


@hop(owner="trainer", lifetime="step", needs=TOGETHER)
def grpo(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    withheld_score: WithheldScores | None = None,
    withheld_uid: WithheldUids | None = None,
    *,
    eps: float = 1e-6,
    norm_by_std: bool = True,
) -> Advantages:
    """(s_i − mean) / (std + eps) within each group; std is the sample's (n − 1).

    Source: GRPO of DeepSeekMath (arXiv 2402.03300), section 4.1; with norm_by_std false, Dr. GRPO (arXiv 2503.20783).

    score, scored, uid, trajectory: one entry a leaf. withheld_score, withheld_uid: members of these groups that are not
    in the batch, because they are too old to be trained on; they count in mean and std, and get nothing.
    Raises ValueError naming the uid for a score that is not finite.
    """
    return estimate_groups(
        lambda g: (g.own_R - g.score_M.mean()) / (g.score_M.std(ddof=1) + eps if norm_by_std else 1.0),
        *(score, scored, uid, trajectory, response_mask, leaf_offsets, withheld_score, withheld_uid),
    )


@hop(owner="trainer", lifetime="step", needs=TOGETHER)
def rloo(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    withheld_score: WithheldScores | None = None,
    withheld_uid: WithheldUids | None = None,
) -> Advantages:
    """s_i − the mean of the group's other scores, an unbiased baseline.

    Source: REINFORCE leave-one-out, Kool et al. 2019 ("Buy 4 REINFORCE samples, get a baseline for free!");
    for language models Ahmadian et al. (arXiv 2402.14740). Ports and errors are those of `grpo`.
    """
    return estimate_groups(
        lambda g: g.own_R - ((g.score_M.sum() - g.score_M) / (len(g.score_M) - 1))[g.member_R],
        *(score, scored, uid, trajectory, response_mask, leaf_offsets, withheld_score, withheld_uid),
    )


@hop(owner="trainer", lifetime="step", needs=WITH_LENGTH)
def opo(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    withheld_score: WithheldScores | None = None,
    withheld_uid: WithheldUids | None = None,
    withheld_length: Int64[Array, "withheld"] | None = None,
) -> Advantages:
    """s_i − Σ l·s / Σ l within each group, l being the sampled tokens of a trajectory: the baseline of least variance.

    Source: "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585). Ports and errors are those of `grpo`;
    withheld members count with withheld_length, and without it are refused.
    """
    if withheld_score is not None and len(withheld_score) and withheld_length is None:
        raise ValueError(
            "the baseline of opo weighs scores by length, and withheld members come without one; "
            "let stale members be dropped, use grpo or rloo, or give their lengths as withheld_length"
        )
    return estimate_groups(
        lambda g: (
            g.own_R - ((g.length_M @ g.score_M) / g.length_M.sum() if g.length_M.any() else g.score_M.mean())
        ),
        *(score, scored, uid, trajectory, response_mask, leaf_offsets),
        *(withheld_score, withheld_uid, withheld_length),
    )


@hop(owner="trainer", lifetime="step", needs=TOGETHER)
def reinforce_pp_baseline(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    withheld_score: WithheldScores | None = None,
    withheld_uid: WithheldUids | None = None,
    *,
    eps: float = 1e-8,
) -> Advantages:
    """(c − mean c) / √(var c + eps) with c = s_i − the mean of its group, on each sampled token of the batch.

    Source: REINFORCE++ with baseline (arXiv 2501.03262, section 3.2). Mean and variance (n − 1) are over the sampled
    tokens of all groups of two scores or more. A group of equal scores counts in them and keeps exactly 0: the
    published formula would push all of its samples one way, by the mean of other groups. Ports and errors are those of
    `grpo`.
    """
    groups = Groups(
        *(score, scored, uid, trajectory, sampled_tokens(response_mask, leaf_offsets)),
        *(withheld_score, withheld_uid),
    )
    centred_T = tile(groups.each(lambda g: g.own_R - g.score_M.mean()), response_mask, leaf_offsets)
    compared_T = tile(groups.where(lambda g: not g.alone), response_mask, leaf_offsets) > 0
    taught_T = tile(groups.where(lambda g: not (g.alone or g.equal)), response_mask, leaf_offsets)
    out_T = whiten(centred_T, compared_T, eps) * taught_T
    return Advantages(out_T.astype(np.float32), groups.metrics())
