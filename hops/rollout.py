"""Rollout: a request becomes a trajectory, returned the moment it ends."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from flowgraph import (
    Array,
    Backlog,
    Below,
    Dim,
    Engine,
    Generation,
    Latest,
    Mask,
    Rejected,
    Sampling,
    Scalars,
    effect,
)

T = TypeVar("T")


class Trajectory(NamedTuple):
    """One trajectory of one leaf: the prompt's tokens, then the sampled ones.

    logprobs and versions are those of the sampled tokens (0 and -1 on the prompt); response_mask marks them.
    backlog: requests that the engine had then and could not compute; one more when it had dropped this one's KV
    to make room
    """

    tokens: Annotated[Int32[Array, "token"], Below("vocab")]
    logprobs: Float32[Array, "token"]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    versions: Int32[Array, "token"]
    leaf_offsets: Annotated[Int64[Array, "leaf+1"], Below("token+1")]
    metrics: Annotated[dict[str, float], Scalars()]
    backlog: Annotated[Backlog, Latest()]


def validate(
    *, temperature: float = 1.0, stop: list[str] | None = None, time_limit: float | None = None
) -> None:
    Sampling(max_new_tokens=1, temperature=temperature, stop=tuple(stop or ()))
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise ValueError(f"time_limit must be a positive number of seconds, not {time_limit}")
    if temperature == 0:
        raise ValueError(
            "temperature 0 samples the same response every time, so a group has nothing to compare"
        )


@effect(uses=Engine, owner="rollout", lifetime="consumed", maps="trajectory", validate=validate)
async def complete(
    prompt: Int32[Array, "prompt"],
    key: UInt64[Array, ""],
    *,
    engine: Engine,
    max_new_tokens: Annotated[int, Dim("response")],
    temperature: float = 1.0,
    stop: list[str] | None = None,
    time_limit: float | None = None,
) -> Trajectory:
    """Sample one response to one prompt. prompt: i32[prompt]; key: u64, the request's own randomness.

    time_limit: seconds after which it is given up, and dropped (reason "time limit"); its slot is free then.

    The bound of `dims.response` is the longest response. metrics: `length` in tokens; `truncated`, 1 when the bound or
    the model's context ended it (the finish reason decides, not the length); `retractions`, how often its KV was
    dropped; `engine_running`, `engine_waiting` and `engine_kv_used`, the engine's load when it ended.
    """
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, stop=tuple(stop or ()))
    out = await within(time_limit, engine.generate(prompt, sampling, key=int(key), rid=uuid.uuid4().hex))
    return trajectory(prompt, out, engine)


async def within(seconds: float | None, what: Awaitable[T]) -> T:
    """What a trajectory waits for. Raises Rejected("time limit") when it takes longer."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            return await what
    except TimeoutError:
        if scope.expired():
            raise Rejected("time limit") from None
        raise


def trajectory(prompt: np.ndarray[Any, Any], out: Generation, engine: Engine) -> Trajectory:
    """A prompt and one response to it. Raises ValueError for a response whose parts do not fit each other."""
    p, r = len(prompt), len(out.ids)
    if not len(out.logprobs) == len(out.versions) == r:
        raise ValueError(
            f"the engine gave {r} ids, {len(out.logprobs)} log-probabilities, {len(out.versions)} versions"
        )
    load = engine.load()
    # Dropped without new weights: for want of KV memory.
    pressed = out.retractions > 0 and len(set(out.versions.tolist())) == 1
    metrics = {
        "length": r,
        "truncated": out.finish_reason in ("length", "context"),
        "retractions": out.retractions,
        "engine_running": load.running,
        "engine_waiting": load.waiting,
        "engine_kv_used": load.kv_used,
    }
    return Trajectory(
        tokens=np.concatenate([prompt, out.ids]).astype(np.int32),
        logprobs=np.concatenate([np.zeros(p, np.float32), out.logprobs]).astype(np.float32),
        response_mask=np.arange(p + r) >= p,
        versions=np.concatenate([np.full(p, -1), out.versions]).astype(np.int32),
        leaf_offsets=np.array([0, p + r], np.int64),
        metrics={name: float(value) for name, value in metrics.items()},
        backlog=Backlog(load.backlog + pressed),
    )
