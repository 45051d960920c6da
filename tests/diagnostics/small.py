"""Hops for small graphs: a ring of three folds, hops on trajectories and steps, and hops that are wrong on purpose.

They are read and checked, never run.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from jaxtyping import Float, Float32, Int32, Int64, UInt64

from flowgraph import Array, Below, Dim, Json, Latest, Learner, Row, Rows, Seam, Tensors, effect, fold, hop


class State(msgspec.Struct):
    rows: int = 0


class Group(NamedTuple):
    prompt: Int32[Array, "prompt"]
    truth: Annotated[Any, Json()]


class Groups(NamedTuple):
    group: Annotated[list[Group], Rows("group")]


@fold(source="group", lifetime="consumed")
def source(state: State) -> Groups:
    raise NotImplementedError


class Trajectory(NamedTuple):
    key: UInt64[Array, ""]


class Trajectories(NamedTuple):
    trajectory: Annotated[list[Trajectory], Rows("trajectory")]


@fold(lifetime="consumed", expand=("group", "trajectory"))
def split(state: State, group: Annotated[Row | None, Rows("group")]) -> Trajectories:
    raise NotImplementedError


@fold(lifetime="consumed", expand=("group", "trajectory"))
def split_by_version(
    state: State,
    group: Annotated[Row | None, Rows("group")],
    version: Annotated[int, Latest()],
    *,
    max_lag: Annotated[int, Seam("version", "max_lag")],
) -> Trajectories:
    raise NotImplementedError


class Pooled(NamedTuple):
    waiting: Annotated[tuple[Row, ...], Rows("trajectory"), Latest()]


def room(state: State, *, places: int) -> int:
    return places - state.rows


def check_places(*, places: int) -> None:
    if places < 1:
        raise ValueError(f"places must be at least 1, not {places}")


@fold(lifetime="consumed", room=room, validate=check_places)
def pool(state: State, trajectory: Annotated[Row | None, Rows("trajectory")], *, places: int) -> Pooled:
    raise NotImplementedError


class Step(NamedTuple):
    batch_id: Int64[Array, ""]


class Steps(NamedTuple):
    step: Annotated[list[Step], Rows("step")]


@fold(lifetime="step", collect=("trajectory", "step"))
def batch(state: State, trajectory: Annotated[Row | None, Rows("trajectory")]) -> Steps:
    raise NotImplementedError


@fold(lifetime="step", collect=("trajectory", "step"))
def batch_of_waiting(
    state: State,
    waiting: Annotated[tuple[Row, ...], Rows("trajectory"), Latest()],
    *,
    samples: Annotated[int, Dim("sample")],
) -> Steps:
    raise NotImplementedError


@hop()
def forgetful(key: UInt64[Array, ""]) -> Float32[Array, ""]:
    raise NotImplementedError


@hop(lifetime="step")
def total(score: Float32[Array, "trajectory"], *, scale: float = 1.0) -> Float32[Array, ""]:
    raise NotImplementedError


@hop(lifetime="step")
def count(key: UInt64[Array, "trajectory"], *, bins: int) -> Float32[Array, "trajectory"]:
    raise NotImplementedError


@hop(lifetime="step")
def longest(prompt: Int32[Array, "trajectory"]) -> Int32[Array, ""]:
    raise NotImplementedError


@hop(lifetime="version")
def publish(batch_id: Int64[Array, ""]) -> Annotated[int, Latest(initial=0)]:
    raise NotImplementedError


@effect(uses=Learner, owner="trainer", lifetime="version")
def train(batch_id: Int64[Array, ""], *, learner: Learner) -> Annotated[dict[str, Any], Tensors()]:
    raise NotImplementedError


@hop(lifetime="consumed")
def vague(key: UInt64[Array, ""]) -> Float[Array, "trajectory"]:
    raise NotImplementedError


@hop(lifetime="consumed")
def wide(key: UInt64[Array, ""]) -> Float32[Array, "prompt prompt prompt"]:
    raise NotImplementedError


@hop(lifetime="step", maps="n")
def scaled(a: Float32[Array, "n"], b: Float32[Array, "n"]) -> Float32[Array, "n"]:
    """Works along any dim, which it calls n."""
    raise NotImplementedError


@hop(lifetime="step")
def table(key: UInt64[Array, "trajectory"]) -> Float32[Array, "prompt"]:
    raise NotImplementedError


@hop(lifetime="step")
def makes_up(key: UInt64[Array, "trajectory"]) -> Float32[Array, "k"]:
    raise NotImplementedError


@hop(lifetime="step")
def bounded(key: UInt64[Array, "trajectory"]) -> Annotated[Int32[Array, "trajectory"], Below("vocb")]:
    raise NotImplementedError
