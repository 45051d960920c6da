"""Train: one batch becomes one optimiser step, or a few. And score: a batch under a learner's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from flowgraph import (
    Aggregation,
    Array,
    Learner,
    Mask,
    Scalars,
    Tensors,
    TrainRows,
    check_aggregation,
    effect,
)

Column = np.ndarray[Any, Any]


class Trained(NamedTuple):
    """weights: the model after this batch, valid until the next step; metrics: those of the learner and the loss."""

    weights: Annotated[dict[str, Any], Tensors()]
    metrics: Annotated[dict[str, float], Scalars()]


def validate(
    *,
    loss: Callable[..., Any],
    aggregate: Aggregation = "token-mean",
    length: int | None = None,
    minibatches: int = 1,
) -> None:
    check_aggregation(aggregate, length)
    if minibatches < 1:
        raise ValueError(f"minibatches must be at least 1, not {minibatches}")


# A sequence is a trajectory, and a trajectory may have several leaves.
NEEDS = {f"aggregate=seq-mean-token-{of}": "trajectory" for of in ("mean", "sum", "sum-norm")}


@effect(uses=Learner, owner="trainer", lifetime="version", validate=validate, needs=NEEDS)
def step(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    logprobs: Float32[Array, "token"],
    advantages: Float32[Array, "token"],
    trajectory: Int64[Array, "leaf"] | None = None,
    reference: Float32[Array, "token"] | None = None,
    old: Float32[Array, "token"] | None = None,
    *,
    learner: Learner,
    loss: Callable[..., Any],
    aggregate: Aggregation = "token-mean",
    length: int | None = None,
    minibatches: int = 1,
) -> Trained:
    """Train on every leaf of the batch once.

    tokens: i32[token], packed leaves at leaf_offsets; logprobs: f32[token], the rollout's; advantages: f32[token].
    trajectory: i64[leaf], what each leaf is of, for all that is said of a sequence; each of its own when left out
    reference: f32[token], log-probabilities of a frozen model (`score`)
    old: f32[token], the learner's before the first step, for `old: train`; made here when it is left out
    aggregate: how the losses of tokens become one: token-mean Σ ℓ / N; seq-mean-token-mean, the mean over sequences of
        their means; seq-mean-token-sum, of their sums; seq-mean-token-sum-norm, of their sums / `length`. Only tokens
        that the loss keeps count, over all ranks and micro-batches
    minibatches: the batch is cut into so many parts of whole trajectories, one optimiser step each; the parts are the
        same for any number of processes. With more than one the batch is scored once before the first (a forward pass
        more), unless `old` is given or the loss reads none. Metrics are then means over the steps; counts are summed
    """
    fields = columns(advantages=advantages, logprobs=logprobs, reference=reference, old=old)
    rows = TrainRows(tokens, leaf_offsets, response_mask, fields, trajectory=trajectory)
    return train(learner, rows, minibatches, loss=loss, aggregate=aggregate, length=length)


def columns(**given: Column | None) -> dict[str, Column]:
    """Those that are there, each an array of its own: torch does not take what can't be written."""
    return {name: np.array(values) for name, values in given.items() if values is not None}


def train(learner: Learner, rows: TrainRows, minibatches: int, **how: Any) -> Trained:
    """One optimiser step for each part of the batch. how: options of `Learner.step`."""
    if minibatches > 1 and "old" not in rows.fields and getattr(how["loss"], "before", True):
        replay = {name: how[name] for name in ("replay",) if name in how}
        rows = rows._replace(fields={**rows.fields, "old": learner.logprobs(rows, **replay)})
    parts = learner.minibatches(rows, minibatches) if minibatches > 1 else [rows]
    metrics = [learner.step(part, **how) for part in parts]
    return Trained(learner.weights(), joined(metrics))


COUNTS = ("tokens", "rows", "positions", "skipped")


def joined(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several steps as those of one: counts are summed, the largest is the largest, all else the mean
    over the steps that were taken.
    """
    if len(metrics) == 1:
        return metrics[0]
    taken = [one for one in metrics if not one["skipped"]] or metrics
    found = {}
    for name in dict.fromkeys(name for one in taken for name in one):
        values = [one[name] for one in taken if name in one]
        found[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return found | {name: sum(one[name] for one in metrics) for name in COUNTS}


class Scored(NamedTuple):
    """rescored: f32[token], log-probabilities under the learner's present weights; 0 off the response."""

    rescored: Float32[Array, "token"]


@effect(uses=Learner, owner="trainer", lifetime="version")
def score(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    *,
    learner: Learner,
) -> Scored:
    """Score a batch with the weights that the learner of this owner has now.

    Of an owner whose learner is frozen it is the reference that a policy is held near: `reference: score.rescored`.
    Of the trainer it reads its columns from `batch`, and gives what `old` of `step` takes; or from `train`, so that it
    fires after the step (while rollout and training overlap the learner may be a step further on by then).
    """
    return Scored(learner.logprobs(TrainRows(tokens, leaf_offsets, response_mask, {})))
