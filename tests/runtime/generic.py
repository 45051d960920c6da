"""Hops that call their dims as they like: what those are, their inputs say."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from jaxtyping import Float32, Int64

from flowgraph import Array, TiledOver, hop


@hop(owner="trainer", lifetime="step", maps="n")
def same(x: Float32[Array, "n"]) -> Float32[Array, "n"]:
    return np.array(x)


@hop(owner="scorer", lifetime="step")
def spread(
    x: Float32[Array, "row"], bounds: Int64[Array, "row+1"], like: Float32[Array, "item"]
) -> Annotated[Float32[Array, "item"], TiledOver("row")]:
    """One value a row, once for each of its items."""
    assert len(like) == bounds[-1]
    return np.repeat(x, np.diff(bounds))
