"""A learner of several processes without torch: hops that use it, and workers that hold a stand-in which remembers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

from flowgraph import Array, Below, Json, Learner, Mask, Scalars, TiledOver, effect, hop
from flowgraph.learners.registry import LearnerOptions
from flowgraph.plan.plan import Owner
from flowgraph.runtime import executors
from flowgraph.runtime.worker import Worker
from tests.runtime.harness import TOY

USE = "tests.runtime.ranked"


class Memory:
    """In place of a learner: what the hops that use it were given, a dict a firing. rank: of its process"""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.given: list[dict[str, Any]] = []

    def close(self) -> None:
        pass


class Odd(NamedTuple):
    """Columns of a whole step, in every way in which its rows may lie in them."""

    wide: Float32[Array, "leaf 3"]
    across: Int32[Array, "2 token"]
    stripes: Annotated[Bool[Array, "2 token"], Mask()]
    bounds: Int64[Array, "leaf+1"]
    notes: Annotated[list[Any], Json("leaf")]
    each: Int32[Array, "trajectory"]
    whole: Float64[Array, "4"]


@hop(owner="trainer", lifetime="step")
def odd(
    tokens: Int32[Array, "token"], leaf_offsets: Int64[Array, "leaf+1"], lag: Int32[Array, "trajectory"]
) -> Odd:
    """Every row's values are made of its own tokens, so one that is another row's shows."""
    sums = np.add.reduceat(tokens, leaf_offsets[:-1])
    return Odd(
        np.stack([sums, sums + 1, sums + 2], 1).astype(np.float32),
        np.stack([tokens, -tokens]),
        np.stack([tokens % 2 == 0, tokens % 3 == 0]),
        leaf_offsets.copy(),
        [{"sum": int(one)} for one in sums],
        np.arange(len(lag), dtype=np.int32),
        np.array([1.0, 2.0, 3.0, float(tokens.sum())]),
    )


class Stepped(NamedTuple):
    weights: Float64[Array, "prompt"]
    metrics: Annotated[dict[str, float], Scalars()]


@effect(uses=Learner, owner="trainer", lifetime="version")
def step(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    advantages: Float32[Array, "token"],
    uid: Int64[Array, "trajectory"],
    ground_truth: Annotated[list[Any], Json("trajectory")],
    bits: Annotated[Bool[Array, "token"], Mask()],
    last: Float32[Array, "token"],
    tiled: Float32[Array, "token"],
    small: Int32[Array, "leaf"],
    double: Int32[Array, "leaf"],
    wide: Float32[Array, "leaf 3"],
    across: Int32[Array, "2 token"],
    stripes: Annotated[Bool[Array, "2 token"], Mask()],
    bounds: Int64[Array, "leaf+1"],
    notes: Annotated[list[Any], Json("leaf")],
    each: Int32[Array, "trajectory"],
    whole: Float64[Array, "4"],
    *,
    learner: Learner,
    fail_on: int = -1,
) -> Stepped:
    """Remembers what it was given. fail_on: the rank that raises"""
    given = dict(locals())
    memory: Any = given.pop("learner")
    if memory.rank == given.pop("fail_on"):
        raise ArithmeticError("no gradient")
    memory.given.append({k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()})
    return Stepped(
        np.full(3, float(tokens.sum())), {"tokens": float(len(tokens)), "rank": float(memory.rank)}
    )


class Rescored(NamedTuple):
    """Columns that every process has a part of, in every way in which they may lie."""

    rescored: Float32[Array, "token"]
    kept: Annotated[Bool[Array, "token"], Mask()]
    two: Int32[Array, "2 token"]
    best: Annotated[Float32[Array, "token"], TiledOver("leaf")]
    ends: Annotated[Int64[Array, "leaf+1"], Below("token+1")]
    first: Int64[Array, "trajectory"]
    constant: Float64[Array, "3"]
    metrics: Annotated[dict[str, float], Scalars()]


@effect(uses=Learner, owner="trainer", lifetime="step")
def rescore(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    uid: Int64[Array, "trajectory"],
    *,
    learner: Learner,
) -> Rescored:
    """Every row's values are made of its own tokens."""
    best = np.maximum.reduceat(tokens, leaf_offsets[:-1]).astype(np.float32)
    kept = tokens % 3 == 0
    return Rescored(
        tokens.astype(np.float32) / 2,
        kept,
        np.stack([tokens, -tokens]),
        np.where(kept, np.repeat(best, np.diff(leaf_offsets)), 0).astype(np.float32),
        leaf_offsets.copy(),
        uid + 100,
        np.array([1.0, 2.0, 3.0]),
        {"tokens": float(len(tokens))},
    )


class Compared(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="rollout", lifetime="step")
def compare(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    uid: Int64[Array, "trajectory"],
    rescored: Float32[Array, "token"],
    kept: Annotated[Bool[Array, "token"], Mask()],
    two: Int32[Array, "2 token"],
    best: Float32[Array, "token"],
    ends: Int64[Array, "leaf+1"],
    first: Int64[Array, "trajectory"],
    constant: Float64[Array, "3"],
) -> Compared:
    """How many values are not those that one process would have given for the whole step."""
    wanted = rescore(tokens, leaf_offsets, uid, learner=None)  # type: ignore[arg-type]
    given = {**locals()}
    names = [name for name in Rescored._fields if name != "metrics"]
    return Compared({name: float((given[name] != getattr(wanted, name)).sum()) for name in names})


class Held(Worker):
    """A worker whose learner is a Memory."""

    def _learner(self, owner: Owner, options: LearnerOptions) -> Any:
        return Memory(self.rank)


@contextmanager
def remembering() -> Iterator[None]:
    """Every worker that is made within, in this process, is a Held."""
    with mock.patch.object(executors, "Worker", Held):
        yield


BATCH = ("tokens", "leaf_offsets", "response_mask", "uid", "ground_truth")
PROMISED = ("bits", "last", "tiled", "small", "double")
ODD = ("wide", "across", "stripes", "bounds", "notes", "each", "whole")
READS = {**dict.fromkeys(BATCH, "batch"), "advantages": "advantage", **dict.fromkeys(PROMISED, "promised")}
READS |= dict.fromkeys(ODD, "odd")


def overrides(model: Path, processes: int) -> list[str]:
    """The toy ring, with a trainer of so many processes whose learner is this model."""
    reads = ", ".join(f"{port}: {hop}" for port, hop in READS.items())
    return [
        f"owners.trainer={{processes: {processes}, learner: {{use: torch, model: {model}, lr: 0.001}}}}",
        f"hops.train={{use: {USE}.step, in: {{{reads}}}}}",
        f"hops.odd={{use: {USE}.odd, in: {{tokens: batch, leaf_offsets: batch, lag: batch}}}}",
        "hops.promised={use: tests.runtime.promises.promise, in: {response_mask: batch, leaf_offsets: batch}}",
    ]


__all__ = ["READS", "TOY", "Held", "Memory", "overrides", "remembering"]
