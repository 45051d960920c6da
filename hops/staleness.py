"""Staleness of what is trained on, token by token: trajectories may span updates of the weights."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from flowgraph import Array, Mask, Scalars, hop


class TokenLag(NamedTuple):
    """metrics: `token_lag_mean` and `token_lag_max`, in versions, over sampled tokens; `spanning`, the share of leaves
    whose sampled tokens are of several versions
    """

    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="trainer", lifetime="step")
def token_lag(
    versions: Int32[Array, "token"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    leaf_offsets: Int64[Array, "leaf+1"],
    batch_id: Int64[Array, ""],
) -> TokenLag:
    """batch_id − the version of the weights that sampled the token. 0 is on-policy: batch 0 trains on version 0.

    It is no larger than the lag of the trajectory, whose tag is the version when it was dispatched.
    Raises ValueError for a sampled token whose version is not in [0, batch_id].
    """
    if not response_mask.any():
        return TokenLag({})
    lag_T = int(batch_id) - versions.astype(np.int64)
    wrong = np.flatnonzero(response_mask & ((lag_T < 0) | (versions < 0)))
    if len(wrong):
        raise ValueError(
            f"token {wrong[0]} was sampled by version {versions[wrong[0]]}, and batch {batch_id} trains it; "
            f"give the columns of one batch"
        )
    sampled_T = lag_T[response_mask]
    leaf_T = np.repeat(np.arange(len(leaf_offsets) - 1), np.diff(leaf_offsets))[response_mask]
    changes = (np.diff(leaf_T) == 0) & (np.diff(sampled_T) != 0)
    spanning = len(np.unique(leaf_T[1:][changes])) / len(np.unique(leaf_T))
    return TokenLag(
        {
            "token_lag_mean": float(sampled_T.mean()),
            "token_lag_max": float(sampled_T.max()),
            "spanning": spanning,
        }
    )
