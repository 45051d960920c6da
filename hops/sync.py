"""Sync: the trained weights become the engine's, and then, not before, the version."""

from __future__ import annotations

from typing import Annotated, Any

from jaxtyping import Int64

from flowgraph import Array, Engine, Latest, Tensors, Version, effect


@effect(uses=Engine, owner="rollout", lifetime="version")
async def publish(
    weights: Annotated[dict[str, Any], Tensors()],
    batch_id: Int64[Array, ""],
    *,
    engine: Engine,
) -> Annotated[Version, Latest(initial=0)]:
    """pause → update_weights → resume. Gives the version: the number of batches accounted for in the weights.

    Repeatable from the start. When the update raises, the engine stays paused: it serves nothing of doubtful weights.
    """
    version = Version(int(batch_id) + 1)
    await engine.pause()
    engine.update_weights(weights, version)
    await engine.resume()
    return version
