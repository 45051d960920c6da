"""Advantage: scores of a batch become one number a token, relative to the other samples of the same prompt.

Common to all estimators: groups are formed by uid. A trajectory counts once however many leaves it has, and its leaves
are rewarded alike. A trajectory without a score is left out, and its own advantage is 0. A group of one, and one whose
scores differ by no more than rounding, give exactly 0: there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64

from flowgraph import Array, Mask, Scalars, TiledOver, hop
from hops.candidates import alike

Vector = np.ndarray[Any, np.dtype[np.float64]]
Sampled = Annotated[Bool[Array, "token"], Mask()]
WithheldScores = Float32[Array, "withheld"]
WithheldUids = Int64[Array, "withheld"]
NONE_F64, NONE_I64 = np.zeros(0, np.float64), np.zeros(0, np.int64)


class Advantages(NamedTuple):
    """out: f32[token], the advantage: the same on every sampled token of a leaf, 0 elsewhere

    metrics: `groups`, and the shares of them that teach nothing: `alone`, with fewer than two scores, and `equal`
    """

    out: Annotated[Float32[Array, "token"], TiledOver("leaf")]
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="trainer", lifetime="step")
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
    groups = _Groups(
        score, scored, uid, trajectory, response_mask, leaf_offsets, withheld_score, withheld_uid
    )
    return groups.relative(
        lambda s_M, _: np.full_like(s_M, s_M.mean()),
        lambda s_M: float(s_M.std(ddof=1)) + eps if norm_by_std else 1.0,
    )


@hop(owner="trainer", lifetime="step")
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
    groups = _Groups(
        score, scored, uid, trajectory, response_mask, leaf_offsets, withheld_score, withheld_uid
    )
    return groups.relative(lambda s_M, _: (s_M.sum() - s_M) / (len(s_M) - 1))


@hop(owner="trainer", lifetime="step")
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
    groups = _Groups(
        *(score, scored, uid, trajectory, response_mask, leaf_offsets),
        *(withheld_score, withheld_uid, withheld_length),
    )
    return groups.relative(
        lambda s_M, l_M: np.full_like(s_M, (l_M * s_M).sum() / l_M.sum() if l_M.any() else s_M.mean())
    )


class _Groups:
    """A batch's leaves and the withheld members, to be taken group by group."""

    def __init__(
        self,
        score: Any,
        scored: Any,
        uid: Any,
        trajectory: Any,
        response_mask: Any,
        leaf_offsets: Any,
        withheld_score: Any = None,
        withheld_uid: Any = None,
        withheld_length: Any = None,
    ) -> None:
        self.scored_L, self.uid_L, self.trajectory_L = scored, uid, trajectory
        self.mask_T, self.lengths_L = response_mask, np.diff(leaf_offsets)
        self.score_L = score.astype(np.float64)
        sampled_T = np.concatenate([[0], np.cumsum(response_mask)])
        self.sampled_L = sampled_T[leaf_offsets[1:]] - sampled_T[leaf_offsets[:-1]]
        self.score_W = NONE_F64 if withheld_score is None else withheld_score.astype(np.float64)
        self.uid_W = NONE_I64 if withheld_uid is None else withheld_uid
        self.sampled_W = np.zeros(len(self.uid_W)) if withheld_length is None else withheld_length
        if len(self.score_W) != len(self.uid_W):
            raise ValueError(
                f"{len(self.score_W)} withheld scores and {len(self.uid_W)} uids; wire both withheld ports"
            )
        _refuse_infinite(self.score_L, self.uid_L, self.scored_L)
        _refuse_infinite(self.score_W, self.uid_W, np.ones(len(self.uid_W), np.bool_))

    def relative(
        self, baseline: Callable[[Vector, Vector], Vector], scale: Callable[[Vector], float] = lambda _: 1.0
    ) -> Advantages:
        """(score − baseline) / scale, both of a group's scores f64[member]; a baseline also of its sampled tokens."""
        out_L = np.zeros(len(self.score_L), np.float64)
        alone = equal = 0
        uids = np.unique(self.uid_L)
        for uid in uids:
            rows = np.flatnonzero((self.uid_L == uid) & self.scored_L)
            _, first, member = np.unique(self.trajectory_L[rows], return_index=True, return_inverse=True)
            apart = self.uid_W == uid
            s_M = np.concatenate([self.score_L[rows[first]], self.score_W[apart]])
            if len(s_M) < 2:
                alone += 1
                continue
            # Dividing by a standard deviation of 1e-17 would turn noise into signal.
            if alike(s_M.tolist()):
                equal += 1
                continue
            own_M = np.bincount(member, self.sampled_L[rows], len(first))
            b_M = baseline(s_M, np.concatenate([own_M, self.sampled_W[apart]]))
            out_L[rows] = (self.score_L[rows] - b_M[member]) / scale(s_M)
        tiled_T = np.where(self.mask_T, np.repeat(out_L, self.lengths_L), 0.0).astype(np.float32)
        n = max(1, len(uids))
        return Advantages(tiled_T, {"groups": float(len(uids)), "alone": alone / n, "equal": equal / n})


def _refuse_infinite(score: Vector, uid: Any, scored: Any) -> None:
    bad = np.flatnonzero(scored & ~np.isfinite(score))
    if len(bad):
        raise ValueError(f"uid {uid[bad[0]]}: score {score[bad[0]]} is not finite")
