"""Checks of a batch, as hops: what they find wrong ends the run by name."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from flowgraph import Array, Mask, Scalars, hop


class Leaves(NamedTuple):
    """metrics: `leaves` of the batch, and `forks`, those beyond the first of their trajectory"""

    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="trainer", lifetime="step")
def one_leaf_per_token(
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    sampled: Int32[Array, "token"],
    trajectory: Int64[Array, "leaf"],
    leaf_offsets: Int64[Array, "leaf+1"],
) -> Leaves:
    """Every sampled token is trained in exactly one leaf of its trajectory, and nothing else is.

    sampled: the token's number in its trajectory, -1 of what was not sampled (`hops.rollout.episode`)
    Raises ValueError naming trajectory and token.
    """
    owner = np.repeat(trajectory, np.diff(leaf_offsets))
    for at in np.flatnonzero(response_mask & (sampled < 0)):
        raise ValueError(
            f"trajectory {owner[at]}: token {at} of the batch was not sampled, and is trained on"
        )
    is_sampled = sampled >= 0
    tokens, which = np.unique(np.stack([owner, sampled])[:, is_sampled], axis=1, return_inverse=True)
    times = np.bincount(which.reshape(-1), response_mask[is_sampled], tokens.shape[1])
    for at in np.flatnonzero(times != 1):
        who, number = tokens[:, at]
        raise ValueError(
            f"trajectory {who}: its sampled token {number} is trained on in {int(times[at])} leaves, not in one; "
            "mark it in the first leaf that has it, as hops.turns.flatten does"
        )
    _gaps(tokens)
    many = len(np.unique(trajectory))
    return Leaves({"leaves": float(len(trajectory)), "forks": float(len(trajectory) - many)})


def _gaps(tokens: Int64[Array, "2 sampled"]) -> None:
    """A trajectory's tokens are numbered from 0 on: one that is missing was sampled, and is in no leaf."""
    for who in np.unique(tokens[0]):
        numbers = tokens[1, tokens[0] == who]
        if numbers[-1] != len(numbers) - 1:
            missing = int(np.setdiff1d(np.arange(numbers[-1] + 1), numbers)[0])
            raise ValueError(f"trajectory {who}: its sampled token {missing} is in no leaf of the batch")
