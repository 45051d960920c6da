"""Hops and folds that keep what they do not declare, each in its own way, and some that only look as if they did."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float32, Int32, Int64

from flowgraph import Array, Event, Json, Rows, Scalars, fold, hop

SEEN: list[int] = []
TABLE = {n: n * n for n in range(100)}
RNG = np.random.default_rng(0)
LOG = logging.getLogger(__name__)
LOCK = threading.Lock()
total = 0


class Sum(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


class Number(NamedTuple):
    out: Float32[Array, ""]


@functools.lru_cache
def squares(n: int) -> list[int]:
    return [i * i for i in range(n)]


class Lazy:
    @functools.cached_property
    def table(self) -> list[int]:
        return list(range(10))


LAZY = Lazy()


@hop(owner="trainer")
def pure(tokens: Int32[Array, "token"], ground_truth: Annotated[list[Any], Json("leaf")]) -> Sum:
    """Tables, caches, logs and locks are no state."""
    LOG.info("%d tokens", len(tokens))
    with LOCK:
        return Sum({"n": float(TABLE[2] + squares(len(tokens))[-1] + LAZY.table[1] + len(ground_truth))})


def _helper(n: int, of: dict[int, int] = {}) -> None:  # noqa: B006
    of[n] = of.get(n, 0) + 1


def _keeps_in_a_global(tokens: Any) -> None:
    SEEN.append(len(tokens))


def _keeps_in_a_number(tokens: Any) -> None:
    global total
    total += len(tokens)


def _keeps_in_what_is_new(tokens: Any) -> None:
    global made_now
    made_now = globals().get("made_now", 0) + len(tokens)


def _draws(tokens: Any) -> None:
    RNG.random()


def _in_a_default(tokens: Any) -> None:
    _helper(len(tokens))


def _in_an_attribute(tokens: Any) -> None:
    _in_an_attribute.calls = getattr(_in_an_attribute, "calls", 0) + 1  # type: ignore[attr-defined]


def _closing() -> Callable[[Any], None]:
    seen: set[int] = set()

    def close(tokens: Any) -> None:
        seen.add(len(tokens))

    return close


class _Counts:
    """Called as a function, it counts."""

    def __init__(self, inner: Iterator[int] | None = None) -> None:
        self.n = inner if inner is not None else itertools.count()

    def __call__(self, tokens: Any) -> None:
        next(self.n)


def counts() -> _Counts:
    return _Counts()


_closed = _closing()
WAYS = {
    "global": _keeps_in_a_global, "number": _keeps_in_a_number, "new": _keeps_in_what_is_new, "rng": _draws,
    "default": _in_a_default, "attribute": _in_an_attribute, "closure": _closed,
}  # fmt: skip


def way(name: str) -> Callable[[Any], None]:
    return WAYS[name]


@hop(owner="trainer")
def keep(tokens: Int32[Array, "token"], *, how: Callable[[Any], None]) -> None:
    how(tokens)


@hop(owner="trainer", lifetime="consumed")
async def keep_async(tokens: Int32[Array, "token"]) -> None:
    SEEN.append(len(tokens))


class Drawn(NamedTuple):
    n: Int64[Array, ""]
    drawn: Float32[Array, ""]


@hop(owner="trainer")
def draw(tokens: Int32[Array, "token"]) -> Drawn:
    """A generator of another module is no state of this one, but it shows in what comes out."""
    return Drawn(np.array(len(tokens)), np.array(random.random(), np.float32))


@hop(owner="trainer")
def once(tokens: Int32[Array, "token"]) -> None:
    """What it knows is out of sight."""
    _Known.calls += 1
    if _Known.calls % 2 == 0:
        raise KeyError("twice")


class _Known:
    calls = 0


@hop(owner="trainer")
def mutate(ground_truth: Annotated[list[Any], Json("leaf")]) -> Sum:
    ground_truth.sort(key=lambda one: -one["sum"])
    return Sum({"first": float(ground_truth[0]["sum"])})


class Count(msgspec.Struct):
    rows: int = 0
    odd: Any = None


class Told(NamedTuple):
    told: Annotated[int, Event()]


TRAJECTORY = Annotated[Any, Rows("trajectory"), Event()]


@fold()
def counter_beside(state: Count, trajectory: TRAJECTORY) -> None:
    SEEN.append(state.rows)


@fold()
def chancy(state: Count, trajectory: TRAJECTORY) -> None:
    state.rows += random.randrange(1 << 40)


@fold()
def teller(state: Count, trajectory: TRAJECTORY) -> Told:
    return Told(random.randrange(1 << 40))


@fold()
def generator(state: Count, trajectory: TRAJECTORY) -> None:
    state.odd = state.odd or (n for n in range(10))
