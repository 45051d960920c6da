"""What bench/r3.py runs in place of an engine and a trainer: real arrays of their shapes, written and read whole."""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float32, Int32, Int64, Integer, UInt64

from flowgraph import Array, Below, Dim, Latest, Mask, Scalars, hop


class Sampled(NamedTuple):
    """As `hops.replay.Routed`."""

    tokens: Annotated[Int32[Array, "token"], Below("vocab")]
    logprobs: Float32[Array, "token"]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    leaf_offsets: Annotated[Int64[Array, "leaf+1"], Below("token+1")]
    recorded: Annotated[Bool[Array, "token"], Mask()]
    routed_experts: Annotated[Int32[Array, "token layers top_k"], Below("experts")]


@functools.cache
def pool(layers: int, experts: int, top_k: int, tokens: int) -> npt.NDArray[np.uint8]:
    """Random experts of twice as many tokens as a trajectory has, as an engine would have recorded them."""
    rng = np.random.default_rng(0)
    return rng.integers(0, experts, (2 * tokens, layers, top_k), np.uint8)


def start(key: int, tokens: int) -> int:
    """Where in the pool a trajectory's experts begin."""
    return key % tokens


@hop(owner="rollout", lifetime="consumed", maps="trajectory")
def sample(
    key: UInt64[Array, ""],
    *,
    prompt: Annotated[int, Dim("prompt")],
    response: Annotated[int, Dim("response")],
    layers: Annotated[int, Dim("layers")],
    experts: Annotated[int, Dim("experts")],
    top_k: Annotated[int, Dim("top_k")],
) -> Sampled:
    """A prompt and a whole response; the experts are there already, so that nothing but their way is timed."""
    n = prompt + response
    at = start(int(key), n)
    mask = np.arange(n) >= prompt
    recorded = np.arange(n) < n - 1
    return Sampled(
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.float32),
        mask,
        np.array([0, n], np.int64),
        recorded,
        pool(layers, experts, top_k, n)[at : at + n],
    )


class Trained(NamedTuple):
    checksum: UInt64[Array, ""]
    metrics: Annotated[dict[str, float], Scalars()]


def checksum(values: npt.NDArray[Any], first: int = 0) -> int:
    """Of [token, ...]: the sum of all bytes, eight at a time, times 2·place + 1 of their token, modulo 2**64.

    first: the place of the first token, so that a batch's is the sum of those of its parts, where they stand in it
    """
    sums = values.reshape(len(values), -1).view(np.uint64).sum(axis=1, dtype=np.uint64)
    places = np.arange(first, first + len(values), dtype=np.uint64)
    return int((sums * (2 * places + 1)).sum(dtype=np.uint64))


def sum_of_others(tokens: int, prompt: int, trajectories: int) -> int:
    """What `train` reads of all columns but the experts, added up; see `sample`."""
    ids, mask, recorded = tokens * (tokens - 1) // 2, tokens - prompt, tokens - 1
    bounds = tokens * trajectories * (trajectories + 1) // 2
    return trajectories * (ids + mask + recorded) + bounds


@hop(owner="trainer", lifetime="version")
def train(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    logprobs: Float32[Array, "token"],
    recorded: Annotated[Bool[Array, "token"], Mask()],
    routed_experts: Integer[Array, "token layers top_k"],
) -> Trained:
    """Read every byte once."""
    others = tokens.sum() + logprobs.sum() + response_mask.sum() + recorded.sum() + leaf_offsets.sum()
    total = checksum(routed_experts)
    metrics = {"high": float(total >> 32), "low": float(total & (2**32 - 1)), "others": float(others)}
    return Trained(np.array(total, np.uint64), metrics)


@hop(owner="rollout", lifetime="version")
def publish(checksum: UInt64[Array, ""], batch_id: Int64[Array, ""]) -> Annotated[int, Latest(initial=0)]:
    """The next version."""
    return int(batch_id) + 1
