"""Train: one batch becomes one optimiser step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from flowgraph import Array, Learner, Mask, Scalars, Tensors, TiledOver, TrainRows, effect


class Trained(NamedTuple):
    """weights: the model after this batch, valid until the next step; metrics: those of the learner and the loss."""

    weights: Annotated[dict[str, Any], Tensors()]
    metrics: Annotated[dict[str, float], Scalars()]


@effect(uses=Learner, owner="trainer", lifetime="version")
def step(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    logprobs: Float32[Array, "token"],
    advantages: Annotated[Float32[Array, "token"], TiledOver("leaf")],
    *,
    learner: Learner,
    loss: Callable[..., Any],
) -> Trained:
    """Train on every leaf of the batch once; `loss` is summed over sampled tokens and divided by their global number.

    tokens: i32[token], packed leaves at leaf_offsets; logprobs: f32[token], the rollout's; advantages: f32[token].
    """
    fields = {"advantages": np.array(advantages), "logprobs": np.array(logprobs)}
    metrics = learner.step(TrainRows(tokens, leaf_offsets, response_mask, fields), loss)
    return Trained(learner.weights(), metrics)


class Rescored(NamedTuple):
    """rescored: f32[token], log-probabilities under the learner's present weights; 0 off the response."""

    rescored: Float32[Array, "token"]


@effect(uses=Learner, owner="trainer", lifetime="version")
def rescore(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    *,
    learner: Learner,
) -> Rescored:
    """Score a batch with the weights that the learner has now. Read its columns from `train`, so that it fires after
    the step; while rollout and training overlap the learner may be a step further on by then.
    """
    return Rescored(learner.logprobs(TrainRows(tokens, leaf_offsets, response_mask, {})))
