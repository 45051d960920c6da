"""Sync: the trained weights become the engine's, and then, not before, the version."""

from __future__ import annotations

import asyncio
import itertools
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from flowgraph import Array, Engine, Latest, Mask, PauseMode, RunError, Scalars, Tensors, Version, effect


class Published(NamedTuple):
    """version: the number of batches accounted for in the weights that are served

    metrics: `pushed`, bytes that went to the engine's replicas; `replicas`, that serve; `retries`, of failed attempts
    """

    version: Annotated[Version, Latest(initial=0)]
    metrics: Annotated[dict[str, float], Scalars()]


def _validate(*, pause: PauseMode = "retract", deadline: float = 300.0) -> None:
    if not 0 < deadline < float("inf"):
        raise ValueError(f"deadline must be a positive number of seconds, not {deadline}")


@effect(uses=Engine, owner="rollout", lifetime="version", validate=_validate)
async def publish(
    weights: Annotated[dict[str, Any], Tensors()],
    batch_id: Int64[Array, ""],
    *,
    engine: Engine,
    pause: PauseMode = "retract",
    deadline: float = 300.0,
) -> Published:
    """pause → release kv cache → update_weights → resume kv cache → continue, on every replica of the engine.

    Repeatable from the start, which is what the engine does when a replica fails on the way. A replica serves nothing
    of doubtful weights; when none serves the new ones within `deadline` seconds, the run fails by name.
    pause: what becomes of requests under way: retract (their KV is computed anew under the new weights), in_place (they
    keep it), abort (they end, and go on as a new request from the tokens that they have)
    """
    done = await engine.sync(weights, int(batch_id) + 1, pause=pause, seconds=deadline)
    metrics = {"pushed": float(done.pushed), "replicas": float(done.replicas), "retries": float(done.retries)}
    return Published(Version(done.version), metrics)


def _validate_checked(
    *, leaves: int = 4, bound: float = 1e-3, pause: PauseMode = "retract", deadline: float = 300.0
) -> None:
    _validate(pause=pause, deadline=deadline)
    if leaves < 1:
        raise ValueError(f"leaves must be at least 1, not {leaves}")
    if not bound > 0:
        raise ValueError(f"bound must be above 0, not {bound}")


@effect(uses=Engine, owner="rollout", lifetime="version", validate=_validate_checked)
async def publish_checked(
    weights: Annotated[dict[str, Any], Tensors()],
    batch_id: Int64[Array, ""],
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    rescored: Float32[Array, "token"],
    *,
    engine: Engine,
    leaves: int = 4,
    bound: float = 1e-3,
    pause: PauseMode = "retract",
    deadline: float = 300.0,
) -> Published:
    """`publish`, and then a test of the whole way: the engine scores leaves of the batch as the learner does.

    rescored: f32[token], the learner's log-probabilities after the step, from `hops.train.score`. The engine's of
    the response tokens of the first `leaves` leaves must be within `bound` of them, or the run fails by name. In
    float32 the two agree to about 3e-5; in bfloat16 they differ by up to 0.3.
    One metric more: `gap`, the largest difference.
    """
    done = await publish(weights, batch_id, engine=engine, pause=pause, deadline=deadline)
    edges = list(itertools.pairwise(leaf_offsets))[:leaves]
    scores = await asyncio.gather(*(engine.logprobs(np.asarray(tokens[a:b])) for a, b in edges))
    gaps = [
        np.abs(score - rescored[a:b])[np.asarray(response_mask[a:b])]
        for (a, b), score in zip(edges, scores, strict=True)
    ]
    gap = float(np.concatenate([np.zeros(1), *gaps]).max())  # NaN, where any is
    if not gap <= bound:
        raise RunError(
            f"after the sync to version {done.version} the engine's log-probabilities are {gap:.3g} off the learner's",
            f"see whether both have one dtype; only then raise the bound of {bound:g}",
        )
    return Published(done.version, {**done.metrics, "gap": gap})
