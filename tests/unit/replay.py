"""Hops that hand on which experts every token was routed to, as an engine emits it today: 61 layers × 8 in int32."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from flowgraph import Array, Below, Latest, hop

GRAPH = """\
graph: replay
dims:
  {group: 2, sample: 4, prompt: {mean: 10, max: 16}, response: {mean: 20, max: 47}, layers: 61, top_k: 8, experts: 256}
owners: {rollout: {}, trainer: {}}
hops:
  dataset: {use: bench.compile_hops.numbers}
  dispatch:
    use: hops.dispatch.watermark
    in: {group: dataset, finished: rollout, free: buffer, dropped: batch, version: {from: sync, delay: 1, max_lag: 1}}
  rollout: {use: tests.unit.replay.sample, owner: rollout, in: {prompt: dispatch, key: dispatch}}
  buffer: {use: hops.buffer.ready, in: {trajectory: rollout, taken: batch, dropped: batch}}
  batch: {use: hops.batch.oldest_first, in: {ready: buffer}}
  sync: {use: tests.unit.replay.learn, owner: trainer, in: {routed_experts: batch, batch_id: batch}}
"""


class Sampled(NamedTuple):
    tokens: Int32[Array, "token"]
    leaf_offsets: Int64[Array, "leaf+1"]
    routed_experts: Annotated[Int32[Array, "token layers top_k"], Below("experts")]


@hop(lifetime="consumed")
def sample(prompt: Int32[Array, "prompt"], key: UInt64[Array, ""]) -> Sampled:
    """The prompt again."""
    routed = np.zeros((len(prompt), 61, 8), np.int32)
    return Sampled(prompt, np.array([0, len(prompt)], np.int64), routed)


@hop(lifetime="version")
def learn(
    routed_experts: Annotated[Int32[Array, "token layers top_k"], Below("experts")],
    batch_id: Int64[Array, ""],
) -> Annotated[int, Latest(initial=0)]:
    """The version after this batch."""
    return int(batch_id) + 1
