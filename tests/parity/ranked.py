"""What the ring in ranked.yaml is made of besides the library."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32

from flowgraph import Array, Mask, Scalars, hop


def vowels(completion: str, ground_truth: Any) -> float:
    """A random model answers nothing right, so what it says is scored by something that it does differ in."""
    return float(sum(ord(letter) % 5 for letter in completion))


class Seen(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="rollout", lifetime="step")
def look(
    rescored: Float32[Array, "token"],
    logprobs: Float32[Array, "token"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
) -> Seen:
    """How far the log-probabilities of each token moved in the step, weighted by its place: a swapped row shows."""
    moved = (rescored - logprobs)[response_mask].astype(np.float64)
    return Seen({"moved": float(np.abs(moved).max()), "placed": float((moved * np.arange(len(moved))).sum())})
