"""Integers that are written in a byte, cross in a byte, and are read in a byte."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32, Int64, Integer

from flowgraph import Array, Below, Scalars, hop, outputs


class Chosen(NamedTuple):
    experts: Annotated[Int32[Array, "token layer"], Below("expert")]


@hop(lifetime="consumed", owner="rollout")
def choose(tokens: Int32[Array, "token"], *, dtype: str = "uint8", over: int = 0) -> Chosen:
    """Of each token two experts, in whatever dtype; over: what is added to the last."""
    experts = np.stack([tokens % 7, tokens % 5], 1).astype(dtype)
    experts[-1] += np.array(over, dtype)
    return Chosen(experts)


@hop(lifetime="consumed", owner="rollout")
def placed(tokens: Int32[Array, "token"], *, dtype: str = "uint8") -> Chosen:
    """The same, written where they will be read, if they are stored in this dtype."""
    out = outputs(placed, token=len(tokens), layer=2, dtypes={"experts": dtype})
    out["experts"][...] = np.stack([tokens % 7, tokens % 5], 1)
    return Chosen(**out)


class Read(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


def _checked(tokens: npt.NDArray[Any], experts: npt.NDArray[Any]) -> Read:
    assert (experts == np.stack([tokens % 7, tokens % 5], 1)).all()
    return Read({"itemsize": experts.itemsize, "copied": float(experts.base is None)})


@hop(owner="trainer")
def one(tokens: Int32[Array, "token"], experts: Integer[Array, "token layer"]) -> Read:
    """Reads one trajectory's as they lie."""
    return _checked(tokens, experts)


@hop(owner="trainer")
def all(
    tokens: Int32[Array, "token"],
    experts: Integer[Array, "token layer"],
    leaf_offsets: Int64[Array, "leaf+1"],
) -> Read:
    """Reads those of a batch as they lie."""
    return _checked(tokens, experts)


@hop(owner="trainer")
def wide(tokens: Int32[Array, "token"], experts: Int32[Array, "token layer"]) -> Read:
    """Reads them as the writer's port says they are."""
    return _checked(tokens, experts)


@hop(owner="trainer")
def real(score: Integer[Array, "leaf"]) -> Read:
    """Takes any integers, and a score is none."""
    return Read({})


class Vague(NamedTuple):
    experts: Integer[Array, "token"]


@hop(owner="rollout")
def vague(tokens: Int32[Array, "token"]) -> Vague:
    """Does not say which integers it gives."""
    return Vague(tokens)
