"""Advantage: scores of a batch become one number a token, relative to the other samples of the same prompt."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from jaxtyping import Bool, Float32, Int64

from flowgraph import Array, Mask, TiledOver, hop


@hop(owner="trainer", lifetime="step")
def grpo(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    leaf_offsets: Int64[Array, "leaf+1"],
    *,
    eps: float = 1e-6,
    norm_by_std: bool = True,
) -> Annotated[Float32[Array, "token"], TiledOver("leaf")]:
    """Group-relative advantage: (s_i − mean) / (std + eps) within each uid, tiled over the tokens, times the mask.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1; without the division, Dr. GRPO (arXiv 2503.20783).
    The standard deviation is the sample's (n − 1). A trajectory counts once however many leaves it has. A group of
    one, and a group whose scores differ by no more than rounding, give exactly 0. A trajectory without a score is
    left out of mean and standard deviation, and its own advantage is 0.

    score, scored, uid, trajectory: one entry a leaf. Returns f32[token]. Raises ValueError naming the uid for a
    score that is not finite.
    """
    s_L = score.astype(np.float64)
    bad_L = scored & ~np.isfinite(s_L)
    if bad_L.any():
        at = int(np.flatnonzero(bad_L)[0])
        raise ValueError(f"uid {uid[at]}: score {score[at]} is not finite")
    out_L = np.zeros(len(s_L), np.float64)
    for one in np.unique(uid):
        rows = np.flatnonzero((uid == one) & scored)
        _, first = np.unique(trajectory[rows], return_index=True)
        members = s_L[rows[first]]
        # max == min up to rounding: dividing by a standard deviation of 1e-17 would turn noise into signal
        if len(members) < 2 or members.max() - members.min() <= 1e-6 * float(np.abs(members).max()):
            continue
        scale = members.std(ddof=1) + eps if norm_by_std else 1.0
        out_L[rows] = (s_L[rows] - members.mean()) / scale
    return np.where(response_mask, np.repeat(out_L, np.diff(leaf_offsets)), 0.0).astype(np.float32)
