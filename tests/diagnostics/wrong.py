"""Hops that break a promise which their signature or their code makes: split, facts, purity, lifetime, room.

They are read and checked, never run.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from jaxtyping import Bool, Float32, Int64, UInt64

from flowgraph import Array, Below, Derivable, Event, Latest, Mask, Row, Rows, Seam, TiledOver, fold, hop
from tests.diagnostics.small import State, Trajectories

SEEN = 0


@hop(maps="leaf", lifetime="consumed")
def mean_of_leaves(key: UInt64[Array, ""]) -> Float32[Array, ""]:
    raise NotImplementedError


@hop(maps="leef", lifetime="consumed")
def misspelt(key: UInt64[Array, ""]) -> Float32[Array, "leaf"]:
    raise NotImplementedError


@hop()
def without_bounds(key: UInt64[Array, ""]) -> Annotated[Float32[Array, "token"], TiledOver("leaf")]:
    raise NotImplementedError


class TwoMasks(NamedTuple):
    value: Annotated[Float32[Array, "token"], TiledOver("leaf")]
    offsets: Int64[Array, "leaf+1"]
    prompt: Annotated[Bool[Array, "token"], Mask()]
    response: Annotated[Bool[Array, "token"], Mask()]


@hop()
def with_two_masks(key: UInt64[Array, ""]) -> TwoMasks:
    raise NotImplementedError


@hop()
def below_a_float(key: UInt64[Array, ""]) -> Annotated[Float32[Array, "token"], Below("vocab")]:
    raise NotImplementedError


class Derived(NamedTuple):
    twice: Annotated[Int64[Array, "leaf"], Derivable(lambda once: 2 * once, ("once",))]
    once: Int64[Array, "leaf"]


@hop()
def derived_in_a_lambda(key: UInt64[Array, ""]) -> Derived:
    raise NotImplementedError


@hop(lifetime="consumed")
def counts_calls(key: UInt64[Array, ""]) -> Float32[Array, ""]:
    global SEEN
    SEEN += 1
    raise NotImplementedError


@hop(lifetime="consumed")
def collects_keys(key: UInt64[Array, ""], *, keys: list[int] = []) -> Float32[Array, ""]:  # noqa: B006
    raise NotImplementedError


def remembering(known: dict[int, float]):  # type: ignore[no-untyped-def]
    @fold(lifetime="consumed")
    def remember(state: State, trajectory: Annotated[Row | None, Rows("trajectory")]) -> None:
        known[len(known)] = 0.0
        raise NotImplementedError

    return remember


remember = remembering({})


@hop(lifetime="run")
def kept_for_ever(key: UInt64[Array, ""]) -> Float32[Array, ""]:
    raise NotImplementedError


class Pooled(NamedTuple):
    waiting: Annotated[tuple[Row, ...], Rows("trajectory"), Latest()]
    free: Annotated[int, Latest()]


def room(state: State, *, places: int) -> int:
    return places - state.rows


@fold(lifetime="consumed", room=room)
def pool(state: State, trajectory: Annotated[Row | None, Rows("trajectory")], *, places: int = 24) -> Pooled:
    raise NotImplementedError


@fold(lifetime="consumed", room=room)
def told_pool(
    state: State,
    trajectory: Annotated[Row | None, Rows("trajectory")],
    taken: Annotated[Row | None, Rows("step"), Event()],
    *,
    places: int = 24,
) -> Pooled:
    raise NotImplementedError


@fold(lifetime="consumed", expand=("group", "trajectory"))
def split_while_free(
    state: State,
    group: Annotated[Row | None, Rows("group")],
    version: Annotated[int, Latest()],
    free: Annotated[int, Latest()],
    *,
    max_lag: Annotated[int, Seam("version", "max_lag")],
) -> Trajectories:
    raise NotImplementedError


def admits_one(**_: object) -> int:
    return 1


@fold(lifetime="consumed", expand=("group", "trajectory"), admits=admits_one)
def one_at_a_time(
    state: State,
    group: Annotated[Row | None, Rows("group")],
    version: Annotated[int, Latest()],
    *,
    max_lag: Annotated[int, Seam("version", "max_lag")],
) -> Trajectories:
    raise NotImplementedError


@fold(lifetime="consumed")
def told_of_steps(
    state: State, step: Annotated[Row | None, Rows("step"), Event()], key: UInt64[Array, ""]
) -> None:
    raise NotImplementedError


class Steps(NamedTuple):
    step: Annotated[list[Two], Rows("step")]


class Two(NamedTuple):
    parents: tuple[Row, ...]


@fold(lifetime="step", collect=("trajectory", "step"))
def batch_of_two(
    state: State,
    first: Annotated[Row | None, Rows("trajectory")],
    second: Annotated[Row | None, Rows("trajectory")],
) -> Steps:
    raise NotImplementedError


@hop(lifetime="consumed")
def once_a_leaf(key: UInt64[Array, "leaf"]) -> Float32[Array, "leaf"]:
    raise NotImplementedError


class Seen:
    """What a method can keep on its object."""

    @hop(lifetime="consumed")
    def count(self, key: UInt64[Array, ""]) -> Float32[Array, ""]:
        raise NotImplementedError


method = Seen().count
