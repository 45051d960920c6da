"""Sync: the trained weights become the engine's, and then, not before, the version."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from jaxtyping import Int64

from flowgraph import Array, Engine, Latest, PauseMode, Scalars, Tensors, Version, effect


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
