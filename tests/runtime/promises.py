"""A hop that promises all that can be promised, and keeps all of it but one."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float32, Int32, Int64

from flowgraph import (
    Array,
    Below,
    Credit,
    Derivable,
    Dim,
    Dropped,
    Event,
    LastToken,
    Mask,
    Row,
    Rows,
    Scalars,
    Seam,
    TiledOver,
    fold,
    hop,
)
from hops.batch import oldest_first
from hops.candidates import Candidates


def twice(small: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return small * np.int32(2)


class Promised(NamedTuple):
    bits: Annotated[Bool[Array, "token"], Mask()]
    last: Annotated[Float32[Array, "token"], LastToken("leaf", mask="response_mask")]
    tiled: Annotated[Float32[Array, "token"], TiledOver("leaf", mask="response_mask")]
    small: Annotated[Int32[Array, "leaf"], Below("token")]
    double: Annotated[Int32[Array, "leaf"], Derivable(twice, ("small",))]


@hop(lifetime="consumed", owner="trainer")
def promise(
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    leaf_offsets: Int64[Array, "leaf+1"],
    *,
    broken: str = "",
    leaf: int = -1,
) -> Promised:
    """The last leaf (or `leaf`) has one element that is not as promised: the first of its tokens, or its own."""
    n, lengths = len(leaf_offsets) - 1, np.diff(leaf_offsets)
    small = np.arange(n, dtype=np.int32)
    tiled = np.where(response_mask, np.repeat(small, lengths), 0).astype(np.float32)
    ends = [np.flatnonzero(response_mask[:end])[-1:] for end in leaf_offsets[1:]]
    last = np.zeros(len(response_mask), np.float32)
    for end, start in zip(ends, leaf_offsets, strict=False):
        last[end[end >= start]] = 3
    made: dict[str, Any] = {
        "bits": response_mask,
        "last": last,
        "tiled": tiled,
        "small": small,
        "double": twice(small),
    }
    if broken == "bits":
        made["bits"] = response_mask.astype(np.int8)
    elif broken:
        value = made[broken] = made[broken].copy()
        value[leaf_offsets[leaf - 1 if leaf < 0 else leaf] if len(value) > n else leaf] = 1_000_000
    return Promised(**made)


class Sums(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="rollout")
def sums(
    bits: Annotated[Bool[Array, "token"], Mask()],
    last: Float32[Array, "token"],
    tiled: Float32[Array, "token"],
    small: Int32[Array, "leaf"],
    double: Int32[Array, "leaf"],
) -> Sums:
    """Someone who reads them, so that they cross."""
    made = {"last": last, "tiled": tiled, "small": small, "double": double, "bits": bits}
    return Sums({name: float(value.sum()) for name, value in made.items()})


class Step(NamedTuple):
    parents: tuple[Row, ...]
    batch_id: Int64[Array, ""]
    lag: Annotated[Int32[Array, "trajectory"], Below("sample")]


class Chosen(NamedTuple):
    leaves: Annotated[list[Step], Rows("step")]
    dropped: Annotated[list[Dropped], Event()]


@fold(lifetime="step", collect=("trajectory", "step"))
def late(
    state: Candidates,
    ready: Annotated[Row | None, Rows("trajectory")],
    *,
    groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    max_lag: Annotated[int, Seam("version", "max_lag")],
    credit: Annotated[int, Credit()],
) -> Chosen:
    """`oldest_first`, but the fifth trajectory of a step is said to be later than it may be."""
    made = oldest_first(state, ready, n_groups=groups, samples=samples, max_lag=max_lag, credit=credit)
    steps, dropped = made.leaves, made.dropped
    lags = [np.where(np.arange(len(s.lag)) == 4, samples, s.lag).astype(np.int32) for s in steps]
    return Chosen([Step(s.parents, s.batch_id, lag) for s, lag in zip(steps, lags, strict=True)], dropped)
