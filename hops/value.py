"""Value: a critic says what it expects of each token's rest, and is then taught what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from flowgraph import Array, Critic, Losses, Mask, Scalars, TokenLoss, Tokens, TrainRows, effect, token_loss


class Estimated(NamedTuple):
    """values: f32[token], what the critic expects before each sampled token; 0 elsewhere."""

    values: Float32[Array, "token"]


@effect(uses=Critic, owner="critic", lifetime="step")
def estimate(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    *,
    critic: Critic,
) -> Estimated:
    """The values of a batch, under the weights that the critic has now."""
    return Estimated(critic.values(TrainRows(tokens, leaf_offsets, response_mask, {})))


class Fitted(NamedTuple):
    """metrics: those of the learner and of `squared_error`, of the last epoch; and of the values as they were given
    `explained_variance`, 1 − Var(return − value) / Var(return) over sampled tokens: 1 is perfect, 0 is a constant's
    """

    metrics: Annotated[dict[str, float], Scalars()]


def _check(*, clip: float | None = 0.2, epochs: int = 1) -> None:
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0, or null for no clipping, not {clip}")
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, not {epochs}")


@effect(uses=Critic, owner="critic", lifetime="step", validate=_check, trains=True)
def fit(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    values: Float32[Array, "token"],
    returns: Float32[Array, "token"],
    *,
    critic: Critic,
    clip: float | None = 0.2,
    epochs: int = 1,
) -> Fitted:
    """Take `epochs` optimiser steps towards the returns, each on the whole batch; the loss is a mean over its tokens.

    values: f32[token], those of `estimate`; returns: f32[token], those of `hops.advantage.gae`
    clip: see `squared_error`; it can only bind from the second epoch on, or where the critic has moved since `estimate`
    """
    fields = {"values": np.array(values), "returns": np.array(returns)}
    rows = TrainRows(tokens, leaf_offsets, response_mask, fields)
    loss = squared_error(clip=clip)
    metrics: dict[str, float] = {}
    for _ in range(epochs):
        metrics = critic.step(rows, loss)
    return Fitted(_explained(metrics))


def squared_error(*, clip: float | None = 0.2) -> TokenLoss:
    """0.5 · max((V − R)², (V_old + clamp(V − V_old, −clip, clip) − R)²), with R = fields["returns"] and
    V_old = fields["values"].

    Source: PPO's value loss as OpenAI's baselines have it ("The 37 Implementation Details of Proximal Policy
    Optimization", detail 9). clip None: 0.5 · (V − R)², as in the paper (arXiv 1707.06347).

    Metrics: `value` and `return`; with a clip `clipped`, the share of tokens at which the clipped term is the larger
    one, so that they pass no gradient; and for `fit` what the variances of R and of R − V_old are made of.
    """

    @token_loss(values=True)
    def loss(tokens: Tokens) -> Losses:
        import torch

        value: Any = tokens.values
        returns, old = tokens.fields["returns"], tokens.fields["values"]
        plain = (value - returns) ** 2
        metrics: dict[str, Any] = {"value": value.detach()}
        for name, moment in zip(_MOMENTS, (returns.double(), (returns - old).double()), strict=True):
            metrics |= {name: moment, f"{name}{_SQUARED}": moment**2}
        if clip is None:
            return Losses(0.5 * plain, metrics)
        moved = value - old
        near = (old + moved.clamp(-clip, clip) - returns) ** 2
        # Within the clip the two differ by rounding only.
        metrics["clipped"] = ((near > plain) & (moved.abs() > clip)).detach().float()
        return Losses(0.5 * torch.maximum(plain, near), metrics)

    return loss


_MOMENTS, _SQUARED = ("return", "left"), "_squared"


def _explained(metrics: Mapping[str, float]) -> dict[str, float]:
    """From means over the tokens of all processes; nothing where the returns are all the same."""
    variance = [
        max(0.0, metrics[f"{name}{_SQUARED}"] - metrics[name] ** 2) for name in _MOMENTS if name in metrics
    ]
    told = {name: value for name, value in metrics.items() if name != "left" and not name.endswith(_SQUARED)}
    if not variance or variance[0] <= 1e-12 * metrics[f"return{_SQUARED}"]:
        return told
    return told | {"explained_variance": 1 - variance[1] / variance[0]}
