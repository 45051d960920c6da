"""A few plain hops, each of which a graph of bench/compile.py uses under many names. They are checked, never run; but
for `numbers`, from which bench/seams.py gets its groups.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from flowgraph import Array, Latest, Mask, Rows, fold, hop


class Cursor(msgspec.Struct):
    at: int = 0


class Group(NamedTuple):
    prompt: Int32[Array, "prompt"]


class Groups(NamedTuple):
    group: Annotated[list[Group], Rows("group")]


@fold(source="group", lifetime="consumed")
def numbers(state: Cursor) -> Groups:
    """Group i is the prompt [i]."""
    state.at += 1
    return Groups([Group(np.array([state.at], np.int32))])


class Sampled(NamedTuple):
    tokens: Int32[Array, "token"]
    x: Float32[Array, "token"]
    mask: Annotated[Bool[Array, "token"], Mask()]
    leaf_offsets: Int64[Array, "leaf+1"]


@hop(lifetime="consumed")
def sample(prompt: Int32[Array, "prompt"], key: UInt64[Array, ""]) -> Sampled:
    """The prompt again."""
    n = len(prompt)
    return Sampled(prompt, prompt.astype(np.float32), np.ones(n, np.bool_), np.array([0, n], np.int64))


@hop(lifetime="consumed")
def shift(x: Float32[Array, "token"], *, by: float = 1.0) -> Float32[Array, "token"]:
    """One number added."""
    return x + np.float32(by)


@hop(lifetime="consumed")
def mix(a: Float32[Array, "token"], b: Float32[Array, "token"]) -> Float32[Array, "token"]:
    """Two branches become one."""
    return (a + b) / 2


@hop(lifetime="consumed")
def weigh(
    x: Float32[Array, "token"], tokens: Int32[Array, "token"], mask: Annotated[Bool[Array, "token"], Mask()]
) -> Float32[Array, "token"]:
    """Reads two columns that were written far up."""
    return (x * tokens * mask).astype(np.float32)


@hop(lifetime="version")
def publish(x: Float32[Array, "token"], batch_id: Int64[Array, ""]) -> Annotated[int, Latest(initial=0)]:
    """The version after this batch."""
    return int(batch_id) + 1
