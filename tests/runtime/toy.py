"""A ring without a model: real folds, real processes, real shared memory, and arithmetic where torch would be."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64, UInt64

from flowgraph import Array, Event, Json, Latest, Mask, Rows, Scalars, fold, hop


class Cursor(msgspec.Struct):
    at: int = 0


class Group(NamedTuple):
    prompt: Int32[Array, "prompt"]
    ground_truth: Annotated[Any, Json()]


class Source(NamedTuple):
    group: Annotated[list[Group], Rows("group")]


@fold(source="group", lifetime="consumed")
def numbers(state: Cursor, *, rows: int = 1 << 30) -> Source:
    """Group i is the prompt [i, i+1, …] of 1 to 4 tokens; its ground truth is a text as long as it likes."""
    if state.at >= rows:
        return Source([])
    i = state.at
    state.at += 1
    return Source([Group(np.arange(i, i + 1 + i % 4, dtype=np.int32), {"sum": i, "note": "é" * (i % 7)})])


class Sampled(NamedTuple):
    tokens: Int32[Array, "token"]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    leaf_offsets: Int64[Array, "leaf+1"]
    unread: Float32[Array, "token"]
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="rollout", lifetime="consumed")
async def sample(
    prompt: Int32[Array, "prompt"],
    key: UInt64[Array, ""],
    *,
    jitter: float = 0.0,
    fail_at: int = -1,
    hang_at: int = -1,
    die_at: int = -1,
    wrong_dtype: bool = False,
    too_long: int = 0,
) -> Sampled:
    """Two leaves of a random but reproducible length, after a random time."""
    rng = np.random.default_rng(int(key))
    await asyncio.sleep(float(rng.random()) * jitter)
    if prompt[0] == fail_at:
        raise ArithmeticError(f"prompt {prompt[0]} can't be sampled")
    if prompt[0] == hang_at:
        await asyncio.sleep(3600)
    if prompt[0] == die_at:
        os._exit(7)
    lengths = [len(prompt) + int(rng.integers(0, 5)) for _ in range(2)]
    tokens = np.concatenate([np.concatenate([prompt, rng.integers(0, 99, n - len(prompt))]) for n in lengths])
    if too_long:
        tokens = np.concatenate([tokens, np.zeros(too_long)])
        lengths[1] += too_long
    mask = np.concatenate([np.arange(n) >= len(prompt) for n in lengths])
    return Sampled(
        tokens.astype(np.float32 if wrong_dtype else np.int32),
        mask,
        np.array([0, *np.cumsum(lengths)], np.int64),
        np.zeros(len(tokens), np.float32),
        {"length": float(len(tokens))},
    )


class Scored(NamedTuple):
    score: Float32[Array, "leaf"]
    scored: Bool[Array, "leaf"]
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="trainer", lifetime="consumed", maps="leaf")
def reward(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    ground_truth: Annotated[list[Any], Json("leaf")],
) -> Scored:
    """The score of a leaf is its token sum plus its ground truth, so a row that is swapped or lost shows."""
    sums = [
        tokens[a:b].sum() + g["sum"]
        for a, b, g in zip(leaf_offsets[:-1], leaf_offsets[1:], ground_truth, strict=True)
    ]
    score = np.array(sums, np.float32)
    return Scored(score, np.ones(len(score), np.bool_), {"reward": float(score.mean())})


class Trained(NamedTuple):
    weights: Float64[Array, "prompt"]
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="trainer", lifetime="version")
def train(
    tokens: Int32[Array, "token"],
    advantages: Float32[Array, "token"],
    lag: Int32[Array, "trajectory"],
    *,
    seconds: float = 0.0,
) -> Trained:
    """The loss is a checksum of all that came in."""
    time.sleep(seconds)
    loss = float((tokens * advantages.astype(np.float64)).sum())
    return Trained(np.full(3, loss), {"loss": loss, "lag": float(lag.max())})


@hop(owner="rollout", lifetime="version")
def publish(
    weights: Float64[Array, "prompt"], batch_id: Int64[Array, ""]
) -> Annotated[int, Latest(initial=0)]:
    assert np.isfinite(weights).all()
    return int(batch_id) + 1


class Evaluated(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="rollout")
async def evaluate(version: Annotated[int, Event()]) -> Evaluated:
    await asyncio.sleep(0.01)
    return Evaluated({"version": float(version)})
