"""Hops that keep, change or lay out values in ways that no reader should notice, and folds that look at rows."""

from __future__ import annotations

import time
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float32, Int32, Int64, UInt8

from flowgraph import (
    Array,
    Derivable,
    Dropped,
    Event,
    Json,
    Latest,
    Mask,
    Row,
    Rows,
    Scalars,
    Shared,
    Text,
    TiledOver,
    fold,
    hop,
)

Seen = Annotated[dict[str, float], Scalars()]


class Told(NamedTuple):
    seen: Seen


# --- handed on -------------------------------------------------------------------------------------------------


class Odd(NamedTuple):
    strided: Float32[Array, "token"]
    columns: Float32[Array, "token 64"]
    notes: Annotated[Any, Json()]


@hop(owner="trainer", lifetime="step")
def odd(tokens: Int32[Array, "token"]) -> Odd:
    """Arrays that do not lie in order."""
    table = np.random.default_rng(0).random((len(tokens), 64), np.float32)
    return Odd(np.repeat(tokens.astype(np.float32), 2)[::2], np.asfortranarray(table), {"left": [1, 2, 3]})


@hop(owner="trainer", lifetime="step")
def sums(
    strided: Float32[Array, "token"], columns: Float32[Array, "token 64"], notes: Annotated[Any, Json()]
) -> Told:
    """What depends on the order in memory; and a value that is no array is changed."""
    notes["left"].pop()
    raw = strided.view(np.uint8).sum()
    return Told({"raw": float(raw), "sum": float(columns.sum()), "left": float(len(notes["left"]))})


class Sampled(NamedTuple):
    tokens: Int32[Array, "token"]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    leaf_offsets: Int64[Array, "leaf+1"]


@hop(owner="rollout", lifetime="consumed")
def three(leaves: Float32[Array, ""]) -> Sampled:
    return Sampled(np.arange(6, dtype=np.int32), np.ones(6, np.bool_), np.array([0, 2, 4, 6], np.int64))


def lengths(texts: list[str]) -> npt.NDArray[np.int32]:
    return np.array([len(text) for text in texts], np.int32)


class Formed(NamedTuple):
    one: Annotated[Bool[Array, "token"], Mask(), TiledOver("leaf", mask="other")]
    other: Annotated[Bool[Array, "token"], Mask(), TiledOver("leaf", mask="one")]
    turn_offsets: Int64[Array, "turn+1"]
    turns: Annotated[Int32[Array, "letter"], Shared("turn")]
    texts: Annotated[list[str], Text("leaf", 4, 8)]
    lengths: Annotated[Int32[Array, "leaf"], Derivable(lengths, ("texts",))]


@hop(owner="rollout", lifetime="consumed")
def formed(tokens: Int32[Array, "token"], leaf_offsets: Int64[Array, "leaf+1"]) -> Formed:
    whole, texts = np.ones(len(tokens), np.bool_), ["é" * i for i in range(len(leaf_offsets) - 1)]
    bounds, letters = np.arange(21, dtype=np.int64) * 2, np.arange(40, dtype=np.int32)
    return Formed(whole, whole, bounds, letters, texts, lengths(texts))


@hop(owner="trainer", lifetime="consumed")
def read_formed(
    one: Bool[Array, "token"],
    other: Bool[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    turn_offsets: Int64[Array, "turn+1"],
    turns: Int32[Array, "letter"],
    texts: Annotated[list[str], Text("leaf", 4, 8)],
    lengths: Int32[Array, "leaf"],
) -> Told:
    return Told({"sum": float(one.sum() + other.sum() + turns.sum() + lengths.sum())})


class Small(NamedTuple):
    bounds: UInt8[Array, "leaf+1"]


@hop(owner="rollout", lifetime="consumed")
def small_bounds(leaf_offsets: Int64[Array, "leaf+1"]) -> Small:
    return Small(np.array([0, 100, 200], np.uint8))


@hop(owner="trainer")
def read_bounds(bounds: UInt8[Array, "leaf+1"]) -> Told:
    return Told({"last": float(bounds[-1])})


# --- folds -----------------------------------------------------------------------------------------------------


class Short(NamedTuple):
    width: Float32[Array, "leaf"]


@hop(owner="trainer", lifetime="trajectory")
def short(leaf_offsets: Int64[Array, "leaf+1"]) -> Short:
    """A value that dies when its row is taken."""
    return Short(np.diff(leaf_offsets).astype(np.float32))


class Kept(msgspec.Struct):
    """What a fold read, and what it was then."""

    widths: list[Any] = []
    sums: list[float] = []


class Changed(NamedTuple):
    changed: Annotated[int, Latest()]


@fold(lifetime="run")
def keeps(
    state: Kept, trajectory: Annotated[Row | None, Rows("trajectory")], width: Float32[Array, "leaf"]
) -> Changed:
    """Keep what is read of every row, and count what is not as it was."""
    if trajectory is not None:
        state.widths.append(width[trajectory.key])
        state.sums.append(float(width[trajectory.key].sum()))
    pairs = zip(state.widths, state.sums, strict=True)
    return Changed(sum(float(width.sum()) != was for width, was in pairs))


@fold(lifetime="run")
def shown(
    state: Kept,
    ready: Annotated[Row | None, Rows("trajectory")],
    width: Float32[Array, "leaf"],
) -> Changed:
    return Changed(0 if ready is None else 1)


class Count(msgspec.Struct):
    n: int = 0


@fold(lifetime="run")
def prompts(state: Count, group: Annotated[Row | None, Rows("group")]) -> Changed:
    """How long all prompts were, by what is known of a row."""
    if group is not None:
        state.n += group.dims["prompt"]
    return Changed(state.n)


@hop(owner="trainer")
def tell(changed: Annotated[int, Latest()], batch_id: Int64[Array, ""]) -> Told:
    return Told({"changed": float(changed)})


class Drops(NamedTuple):
    dropped: Annotated[list[Dropped], Event()]


@fold(lifetime="run")
def hasty(state: Count, finished: Annotated[Row | None, Rows("trajectory"), Event()]) -> Drops:
    return Drops([Dropped(finished, "haste")] if finished is not None else [])


# --- a ring in which nobody reads the prompt -------------------------------------------------------------------


class Bare(NamedTuple):
    prompt: Int32[Array, "prompt"]


class Groups(NamedTuple):
    group: Annotated[list[Bare], Rows("group")]


@fold(source="group", lifetime="consumed")
def bare(state: Count) -> Groups:
    state.n += 1
    return Groups([Bare(np.zeros(1 + state.n % 3, np.int32))])


class Blank(NamedTuple):
    leaves: Float32[Array, ""]


@hop(owner="rollout", lifetime="consumed")
def blank(uid: Int64[Array, ""]) -> Blank:
    return Blank(np.array(0, np.float32))


class Even(NamedTuple):
    score: Float32[Array, "leaf"]
    scored: Bool[Array, "leaf"]


@hop(owner="trainer", lifetime="consumed")
def even(leaf_offsets: Int64[Array, "leaf+1"]) -> Even:
    count = len(leaf_offsets) - 1
    return Even(np.arange(count, dtype=np.float32), np.ones(count, np.bool_))


class Widths(NamedTuple):
    changed: Annotated[int, Latest()]


@fold(lifetime="run")
def early(
    state: Count, finished: Annotated[Row | None, Rows("trajectory"), Event()], width: Float32[Array, "leaf"]
) -> Widths:
    state.n += 0 if finished is None else len(width[finished.key])
    return Widths(state.n)


@hop(owner="trainer", lifetime="step")
def slow(batch_id: Int64[Array, ""], *, seconds: float) -> Odd:
    """Takes its time."""
    time.sleep(seconds)
    return Odd(np.zeros(1, np.float32), np.zeros((1, 64), np.float32), {"left": [1, 2, 3]})


@hop(owner="trainer", lifetime="step")
def slow_after(notes: Annotated[Any, Json()], *, seconds: float) -> Told:
    time.sleep(seconds)
    return Told({"left": float(len(notes["left"]))})
