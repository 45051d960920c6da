"""Replay: what an engine chose while it sampled crosses to training, so that training chooses the same.

SGLang 0.5 gives it as int32 of all `num_hidden_layers` layers, base64 in the JSON of a reply, when it was started with
`flags: {enable-return-routed-experts: true}` (or `enable-return-indexer-topk`). The engine's side decodes it to the
smallest dtype, and marks what was not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Integer, UInt64

from flowgraph import (
    Aggregation,
    Array,
    Backlog,
    Below,
    Dim,
    Engine,
    Generation,
    Latest,
    Learner,
    Mask,
    RunError,
    Sampling,
    Scalars,
    Side,
    SideChannel,
    TrainRows,
    effect,
    outputs,
)
from hops.rollout import sample, trajectory, validate
from hops.train import NEEDS, Trained, columns, train
from hops.train import validate as validate_train


class Routed(NamedTuple):
    """A trajectory as `hops.rollout.Trajectory`, and the experts that each token was routed to (expert replay, R3).

    routed_experts: of every token in every layer the top-k expert ids; 0 in layers that have no experts
    recorded: where the engine recorded a row at all, which it does not for the last token, nor for any of an empty
    response; elsewhere ids say nothing, and must not be read as expert 0
    """

    tokens: Annotated[Int32[Array, "token"], Below("vocab")]
    logprobs: Float32[Array, "token"]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    versions: Int32[Array, "token"]
    leaf_offsets: Annotated[Int64[Array, "leaf+1"], Below("token+1")]
    metrics: Annotated[dict[str, float], Scalars()]
    backlog: Annotated[Backlog, Latest()]
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
    metrics: Annotated[dict[str, float], Scalars()]
    backlog: Annotated[Backlog, Latest()]
    recorded: Annotated[Bool[Array, "token"], Mask()]
    routed_experts: Annotated[Int32[Array, "token layers top_k"], Below("experts")]
    indexer_topk: Annotated[Int32[Array, "token layers index_top_k"], Below("token")]


@effect(uses=Engine, owner="rollout", lifetime="consumed", maps="trajectory", validate=validate)
async def rollout_routed(
    prompt: Int32[Array, "prompt"],
    key: UInt64[Array, ""],
    *,
    engine: Engine,
    max_new_tokens: Annotated[int, Dim("response")],
    layers: Annotated[int, Dim("layers")],
    top_k: Annotated[int, Dim("top_k")],
    temperature: float = 1.0,
    stop: list[str] | None = None,
    time_limit: float | None = None,
) -> Routed:
    """Sample one response, as `hops.rollout.complete` does, and return the experts that its tokens were routed to."""
    record: tuple[SideChannel, ...] = ("routed_experts",)
    sampling = Sampling(max_new_tokens, temperature, tuple(stop or ()), record)
    out = await sample(prompt, key, engine, sampling, time_limit)
    experts = _side(out, "routed_experts", (len(prompt), layers, top_k))
    n, sizes = len(prompt) + len(out.ids), dict(zip(("layers", "top_k"), experts.shape[1:], strict=True))
    place = outputs(rollout_routed, token=n, leaf=1, **sizes, dtypes={"routed_experts": experts.dtype})
    experts.write(place["routed_experts"])
    place["recorded"][:] = experts.recorded
    return Routed(**trajectory(prompt, out, engine, place), **place)


@effect(uses=Engine, owner="rollout", lifetime="consumed", maps="trajectory", validate=validate)
async def rollout_indexed(
    prompt: Int32[Array, "prompt"],
    key: UInt64[Array, ""],
    *,
    engine: Engine,
    max_new_tokens: Annotated[int, Dim("response")],
    layers: Annotated[int, Dim("layers")],
    top_k: Annotated[int, Dim("top_k")],
    index_top_k: Annotated[int, Dim("index_top_k")],
    temperature: float = 1.0,
    stop: list[str] | None = None,
    time_limit: float | None = None,
) -> Indexed:
    """Sample one response and return routed experts and the indexer's positions, where both were recorded."""
    record: tuple[SideChannel, ...] = ("routed_experts", "indexer_topk")
    sampling = Sampling(max_new_tokens, temperature, tuple(stop or ()), record)
    out = await sample(prompt, key, engine, sampling, time_limit)
    experts = _side(out, "routed_experts", (len(prompt), layers, top_k))
    positions = _side(out, "indexer_topk", (len(prompt), layers, index_top_k))
    n, sizes = len(prompt) + len(out.ids), dict(zip(("layers", "top_k"), experts.shape[1:], strict=True))
    dtypes = {"routed_experts": experts.dtype, "indexer_topk": positions.dtype}
    place = outputs(rollout_indexed, token=n, leaf=1, **sizes, index_top_k=positions.shape[2], dtypes=dtypes)
    experts.write(place["routed_experts"])
    positions.write(place["indexer_topk"])
    place["recorded"][:] = experts.recorded & positions.recorded
    return Indexed(**trajectory(prompt, out, engine, place), **place)


def _side(out: Generation, name: SideChannel, empty: tuple[int, int, int]) -> Side:
    """A side channel of a response. Of one without a token nothing was recorded: `empty` is the shape of that.

    Raises RunError where tokens came without the channel.
    """
    if name in out.side:
        return out.side[name]
    if len(out.ids):
        text = f"the engine sampled {len(out.ids)} tokens and recorded no {name} ({out.finish_reason})"
        raise RunError(text, "take an engine that records what `Sampling.record` asks for")
    return Side((np.zeros(empty, np.uint8),), np.zeros(empty[0], np.bool_), np.dtype(np.uint8))


def _validate(*, replay: bool = True, **options: Any) -> None:
    validate_train(**options)


@effect(uses=Learner, owner="trainer", lifetime="version", validate=_validate, needs=NEEDS)
def train_routed(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    logprobs: Float32[Array, "token"],
    advantages: Float32[Array, "token"],
    recorded: Annotated[Bool[Array, "token"], Mask()],
    routed_experts: Integer[Array, "token layers top_k"],
    trajectory: Int64[Array, "leaf"] | None = None,
    reference: Float32[Array, "token"] | None = None,
    old: Float32[Array, "token"] | None = None,
    *,
    learner: Learner,
    loss: Callable[..., Any],
    aggregate: Aggregation = "token-mean",
    length: int | None = None,
    minibatches: int = 1,
    replay: bool = True,
) -> Trained:
    """Train on a batch, as `hops.train.step` does, with the experts that rollout chose, where they were recorded.

    replay: false lets the model choose for itself, and only compares.
    Metrics besides: `recorded`, the share of the tokens that were computed whose routing was recorded, and
    `routing_mismatch`, the share of these, in all layers with experts, for which training executed others.
    """
    side = {"routed_experts": routed_experts}
    fields = columns(advantages=advantages, logprobs=logprobs, reference=reference, old=old)
    rows = TrainRows(tokens, leaf_offsets, response_mask, fields, side, recorded, trajectory)
    return train(learner, rows, minibatches, loss=loss, aggregate=aggregate, length=length, replay=replay)


@effect(uses=Learner, owner="trainer", lifetime="version", validate=_validate, needs=NEEDS)
def train_indexed(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    logprobs: Float32[Array, "token"],
    advantages: Float32[Array, "token"],
    recorded: Annotated[Bool[Array, "token"], Mask()],
    routed_experts: Integer[Array, "token layers top_k"],
    indexer_topk: Integer[Array, "token layers index_top_k"],
    trajectory: Int64[Array, "leaf"] | None = None,
    reference: Float32[Array, "token"] | None = None,
    old: Float32[Array, "token"] | None = None,
    *,
    learner: Learner,
    loss: Callable[..., Any],
    aggregate: Aggregation = "token-mean",
    length: int | None = None,
    minibatches: int = 1,
    replay: bool = True,
) -> Trained:
    """Train on a batch, as `train_routed` does, with the experts and the attended positions that rollout chose.

    One metric more: `indexer_mismatch`, of the positions what `routing_mismatch` is of the experts.
    """
    side = {"routed_experts": routed_experts, "indexer_topk": indexer_topk}
    fields = columns(advantages=advantages, logprobs=logprobs, reference=reference, old=old)
    rows = TrainRows(tokens, leaf_offsets, response_mask, fields, side, recorded, trajectory)
    return train(learner, rows, minibatches, loss=loss, aggregate=aggregate, length=length, replay=replay)
