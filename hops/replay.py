"""Replay: what an engine chose while it sampled crosses to training, so that training chooses the same.

SGLang 0.5 gives it as int32 of all `num_hidden_layers` layers, base64 in the JSON of a reply, when it was started with
`flags: {enable-return-routed-experts: true}` (or `enable-return-indexer-topk`). The engine's side decodes it to the
smallest dtype, and marks what was not recorded. The trainers here are described: they say what crosses, no more.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from flowgraph import (
    Array,
    Below,
    Dim,
    Engine,
    Generation,
    Learner,
    Mask,
    RunError,
    Sampling,
    Side,
    SideChannel,
    Tensors,
    TiledOver,
    effect,
)
from hops.rollout import trajectory, validate


class Routed(NamedTuple):
    """A trajectory, and the experts that each token was routed to (routed-expert replay, R3).

    routed_experts: of every token in every layer the top-k expert ids; 0 in layers that have no experts
    recorded: where the engine recorded a row at all, which it does not for the last token; elsewhere ids say nothing,
    and must not be read as expert 0
    """

    tokens: Annotated[Int32[Array, "token"], Below("vocab")]
    logprobs: Float32[Array, "token"]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    versions: Int32[Array, "token"]
    leaf_offsets: Annotated[Int64[Array, "leaf+1"], Below("token+1")]
    recorded: Annotated[Bool[Array, "token"], Mask()]
    routed_experts: Annotated[Int32[Array, "token layers top_k"], Below("experts")]


class Indexed(NamedTuple):
    """A trajectory with routed experts, and the positions that sparse attention let each token attend to.

    indexer_topk: of every token in every layer `index_top_k` positions of its own trajectory. A token that has fewer
    before it repeats its own position, so that every entry is a position
    """

    tokens: Annotated[Int32[Array, "token"], Below("vocab")]
    logprobs: Float32[Array, "token"]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    versions: Int32[Array, "token"]
    leaf_offsets: Annotated[Int64[Array, "leaf+1"], Below("token+1")]
    recorded: Annotated[Bool[Array, "token"], Mask()]
    routed_experts: Annotated[Int32[Array, "token layers top_k"], Below("experts")]
    indexer_topk: Annotated[Int32[Array, "token layers index_top_k"], Below("token")]


class Trained(NamedTuple):
    """The model after this batch, valid until the next step."""

    weights: Annotated[dict[str, Any], Tensors()]


@effect(uses=Engine, owner="rollout", lifetime="consumed", maps="trajectory", validate=validate)
async def rollout_routed(
    prompt: Int32[Array, "prompt"],
    key: UInt64[Array, ""],
    *,
    engine: Engine,
    max_new_tokens: Annotated[int, Dim("response")],
    temperature: float = 1.0,
    stop: list[str] | None = None,
) -> Routed:
    """Sample one response, as `hops.rollout.complete` does, and return the experts that its tokens were routed to."""
    record: tuple[SideChannel, ...] = ("routed_experts",)
    sampling = Sampling(max_new_tokens, temperature, tuple(stop or ()), record)
    out = await engine.generate(prompt, sampling, key=int(key), rid=uuid.uuid4().hex)
    experts, columns = _side(out, "routed_experts", len(prompt)), trajectory(prompt, out, engine)._asdict()
    columns = {name: columns[name] for name in Routed._fields if name in columns}
    return Routed(**columns, recorded=experts.recorded, routed_experts=experts.values.astype(np.int32))


@effect(uses=Engine, owner="rollout", lifetime="consumed", maps="trajectory", validate=validate)
async def rollout_indexed(
    prompt: Int32[Array, "prompt"],
    key: UInt64[Array, ""],
    *,
    engine: Engine,
    max_new_tokens: Annotated[int, Dim("response")],
    temperature: float = 1.0,
    stop: list[str] | None = None,
) -> Indexed:
    """Sample one response and return routed experts and the indexer's positions, where both were recorded."""
    record: tuple[SideChannel, ...] = ("routed_experts", "indexer_topk")
    sampling = Sampling(max_new_tokens, temperature, tuple(stop or ()), record)
    out = await engine.generate(prompt, sampling, key=int(key), rid=uuid.uuid4().hex)
    experts, positions = (_side(out, name, len(prompt)) for name in record)
    columns = trajectory(prompt, out, engine)._asdict()
    columns = {name: columns[name] for name in Indexed._fields if name in columns}
    return Indexed(
        **columns,
        recorded=experts.recorded & positions.recorded,
        routed_experts=experts.values.astype(np.int32),
        indexer_topk=positions.values.astype(np.int32),
    )


def _side(out: Generation, name: SideChannel, prompt: int) -> Side:
    """A side channel of a response. Raises RunError for one without a token, of which nothing was recorded."""
    if name not in out.side:
        text = f"the engine recorded no {name}: it sampled no token after a prompt of {prompt} ({out.finish_reason})"
        raise RunError(text, "lower dims.prompt.max below the model's context")
    return out.side[name]


@effect(uses=Learner, owner="trainer", lifetime="version", described="a trainer with routing replay")
def train_routed(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    logprobs: Float32[Array, "token"],
    advantages: Annotated[Float32[Array, "token"], TiledOver("leaf", mask="response_mask")],
    recorded: Annotated[Bool[Array, "token"], Mask()],
    routed_experts: Int32[Array, "token layers top_k"],
    *,
    learner: Learner,
    loss: Callable[..., Any],
) -> Trained:
    """Train on a batch with the experts that rollout chose, where they were recorded."""


@effect(
    uses=Learner, owner="trainer", lifetime="version", described="a trainer with routing and indexer replay"
)
def train_indexed(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    logprobs: Float32[Array, "token"],
    advantages: Annotated[Float32[Array, "token"], TiledOver("leaf", mask="response_mask")],
    recorded: Annotated[Bool[Array, "token"], Mask()],
    routed_experts: Int32[Array, "token layers top_k"],
    indexer_topk: Int32[Array, "token layers index_top_k"],
    *,
    learner: Learner,
    loss: Callable[..., Any],
) -> Trained:
    """Train on a batch with the experts and the attended positions that rollout chose."""
