"""Hops as users may add them to the toy ring: beside it, before it, slow, odd."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64, UInt64

from flowgraph import (
    Array,
    Credit,
    Dim,
    Dropped,
    Event,
    Json,
    Latest,
    Rejected,
    Row,
    Rows,
    Scalars,
    Seam,
    Text,
    fold,
    hop,
)
from hops.batch import Step, oldest_first
from hops.candidates import Candidates
from tests.runtime.toy import Sampled, Scored, sample


@hop(owner="rollout", lifetime="consumed")
async def straggle(
    prompt: Int32[Array, "prompt"],
    key: UInt64[Array, ""],
    *,
    share: float = 0.3,
    seconds: float = 0.05,
    jitter: float = 0.002,
) -> Sampled:
    """`sample`, but a share of the trajectories takes as long as several steps do."""
    if np.random.default_rng([int(key)]).random() < share:
        await asyncio.sleep(seconds)
    made: Sampled = await sample(prompt, key, jitter=jitter)
    return made


class Seen(NamedTuple):
    seen: Int64[Array, ""]
    words: Annotated[list[str], Text("leaf", max=8)]
    notes: Annotated[list[Any], Json("leaf", max=8)]
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="trainer", lifetime="consumed")
async def look(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    *,
    seconds: float = 0.0,
    words: int = 8,
    lists: int = 0,
) -> Seen:
    """A look at a trajectory beside the ring: the sum of its tokens, as a number, as texts and as JSON."""
    await asyncio.sleep(seconds)
    total = int(tokens.sum())
    n = len(leaf_offsets) - 1 + lists
    return Seen(np.array(total, np.int64), ["\n" * words] * n, [total] * n, {"sum": float(total)})


class Summed(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="trainer")
def compare(
    tokens: Int32[Array, "token"],
    seen: Int64[Array, "trajectory"],
    words: Annotated[list[str], Text("leaf")],
    notes: Annotated[list[Any], Json("leaf")],
    leaf_offsets: Int64[Array, "leaf+1"],
) -> Summed:
    """What was seen beside the ring is what the step trains on."""
    leaves = len(leaf_offsets) - 1
    return Summed(
        {
            "difference": float(seen.sum() - tokens.sum()),
            "notes": float(sum(notes) - 2 * seen.sum()),
            "lists": float(leaves - len(words)) + float(leaves - len(notes)),
        }
    )


@hop(owner="rollout")
async def watch_step(tokens: Int32[Array, "token"], *, seconds: float = 0.0) -> None:
    await asyncio.sleep(seconds)


@hop()
async def nowhere(tokens: Int32[Array, "token"]) -> None:
    """Nobody reads it, so it is placed on the driver."""
    await asyncio.sleep(0)


class Hinted(NamedTuple):
    hint: Int64[Array, ""]


@hop(owner="trainer", lifetime="consumed")
async def hint(prompt: Int32[Array, "prompt"]) -> Hinted:
    await asyncio.sleep(0.002 * (int(prompt[0]) % 2))
    return Hinted(np.array(prompt[0], np.int64))


@hop(owner="rollout", lifetime="consumed")
async def hinted(prompt: Int32[Array, "prompt"], key: UInt64[Array, ""], hint: Int64[Array, ""]) -> Sampled:
    assert hint == prompt[0]
    made: Sampled = await sample(prompt, key)
    return made


@hop(owner="trainer", lifetime="version")
def keep(tokens: Int32[Array, "token"]) -> Int64[Array, ""]:
    """What lives as long as a version, and what nobody publishes, must not fill the arena."""
    return np.array(tokens.sum(), np.int64)


@hop(owner="trainer")
def with_version(tokens: Int32[Array, "token"], version: Annotated[int, Latest()]) -> Summed:
    return Summed({"version": float(version)})


@hop(owner="trainer")
def after_sync(batch_id: Int64[Array, ""], weights: Float64[Array, "prompt"]) -> Summed:
    return Summed({"step": float(batch_id) + 1})


@hop(owner="trainer")
def gives_up(tokens: Int32[Array, "token"], *, how: str) -> None:
    if how == "exit":
        sys.exit(3)
    raise asyncio.CancelledError


@hop(owner="rollout")
async def cancelled(tokens: Int32[Array, "token"]) -> None:
    task = asyncio.create_task(asyncio.sleep(10))
    task.cancel()
    await task


class Count(msgspec.Struct):
    rows: int = 0


@fold()
def counter(state: Count, trajectory: Annotated[Any, Rows("trajectory"), Event()]) -> None:
    """A fold that only counts."""
    state.rows += trajectory is not None


@fold()
def taker(state: Count, trajectory: Annotated[Row | None, Rows("trajectory")]) -> None:
    """Another reader of the rows that the buffer takes."""
    state.rows += trajectory is not None


class Shown(NamedTuple):
    ready: Annotated[list[Row], Rows("trajectory")]


@fold()
def show_as_list(state: Count, ready: Annotated[Row | None, Rows("trajectory")]) -> Shown:
    return Shown([] if ready is None else [ready])


@fold()
def shows_a_number(state: Count, ready: Annotated[Row | None, Rows("trajectory")]) -> Shown:
    return Shown(7)  # type: ignore[arg-type]


@fold()
def shows_nothing(state: Count, ready: Annotated[Row | None, Rows("trajectory")]) -> Shown:
    return None  # type: ignore[return-value]


class Chosen(NamedTuple):
    leaves: Annotated[tuple[Step, ...], Rows("step")]
    dropped: Annotated[list[Dropped], Event()]


@fold(lifetime="step", collect=("trajectory", "step"))
def batch_of_tuples(
    state: Candidates,
    ready: Annotated[Row | None, Rows("trajectory")],
    *,
    groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    max_lag: Annotated[int, Seam("version", "max_lag")],
) -> Chosen:
    """It has no credit, so that it is called only while it may make a step."""
    made = oldest_first(state, ready, n_groups=groups, samples=samples, max_lag=max_lag, credit=1)
    return Chosen(tuple(made.leaves), made.dropped)


@hop(owner="rollout")
def not_finite(tokens: Int32[Array, "token"]) -> Summed:
    return Summed({"nan": float("nan")})


@hop(owner="trainer")
def loud(tokens: Int32[Array, "token"], *, die: bool = False) -> None:
    os.write(2, b"\xff\xfe x" * 1_000_000)
    if die:
        os._exit(5)


@hop(owner="trainer")
def hangs_up(tokens: Int32[Array, "token"]) -> None:
    """Close the socket to the driver, and live on."""
    os.close(int(sys.argv[1]))
    time.sleep(10)


@hop(owner="trainer")
def stops_itself(tokens: Int32[Array, "token"]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@hop(owner="trainer", lifetime="consumed")
def graded(tokens: Int32[Array, "token"], uid: Int64[Array, "leaf"]) -> Scored:
    """Leaves of an even group are all worth 1; those of an odd one are worth what was sampled."""
    score = np.where(uid % 2 == 0, 1.0, float(tokens.sum())).astype(np.float32)
    return Scored(score, np.ones(len(score), np.bool_), {"reward": float(score.mean())})


@hop(owner="trainer", lifetime="consumed")
def always_right(tokens: Int32[Array, "token"], uid: Int64[Array, "leaf"]) -> Scored:
    return Scored(np.ones(len(uid), np.float32), np.ones(len(uid), np.bool_), {})


@hop(owner="trainer")
def count_even(uid: Int64[Array, "leaf"]) -> Summed:
    return Summed({"even": float((uid % 2 == 0).sum())})


def is_odd(completion: str, ground_truth: Any) -> float:
    """A score that texts made up at random get about as often as not."""
    return float(len(completion) % 2)


@hop(owner="rollout", lifetime="consumed")
async def refuses(prompt: Int32[Array, "prompt"], key: UInt64[Array, ""], *, of: int = 1) -> Sampled:
    """`sample`, but of every third prompt each `of`-th key comes to nothing."""
    if prompt[0] % 3 == 0 and int(key) % of == 0:
        raise Rejected("refused")
    sampled: Sampled = await sample(prompt, key)
    return sampled


class Judged(NamedTuple):
    good: Bool[Array, "leaf"]


@hop(owner="trainer", lifetime="consumed")
def rejects_some(score: Float32[Array, "leaf"]) -> Judged:
    if score[0] % 2:
        raise Rejected("odd")
    return Judged(score > 0)


@hop(owner="trainer")
def refuses_a_step(tokens: Int32[Array, "token"]) -> None:
    raise Rejected("refused")


class Greedy(NamedTuple):
    leaves: Annotated[list[Step], Rows("step")]
    dropped: Annotated[list[Dropped], Event()]


@fold(lifetime="step", collect=("trajectory", "step"))
def takes_what_came_to_nothing(
    state: Candidates,
    ready: Annotated[Row | None, Rows("trajectory")],
    *,
    credit: Annotated[int, Credit()],
) -> Greedy:
    if ready is None or not ready.failed or not credit:
        return Greedy([], [])
    return Greedy([Step((ready,), np.array(0, np.int64), np.zeros(1, np.int32))], [])


@fold(lifetime="step", collect=("trajectory", "step"))
def has_no_credit(
    state: Candidates,
    ready: Annotated[Row | None, Rows("trajectory")],
    *,
    credit: Annotated[int, Credit()],
) -> Greedy:
    """A step of each trajectory, whatever training has room for."""
    if ready is None:
        return Greedy([], [])
    return Greedy([Step((ready,), np.array(0, np.int64), np.zeros(1, np.int32))], [])


class Taken(msgspec.Struct):
    rows: list[Row] = []
    made: int = 0


@fold(lifetime="step", collect=("trajectory", "step"))
def takes(
    state: Taken,
    ready: Annotated[Row | None, Rows("trajectory")],
    *,
    credit: Annotated[int, Credit()],
    max_lag: Annotated[int, Seam("version", "max_lag")],
    size: int,
    twice: bool = False,
) -> Greedy:
    """A step of so many rows, whatever their age; twice: the first row of a step is in the next one too."""
    if ready is not None:
        state.rows.append(ready)
    if not credit or len(state.rows) < size:
        return Greedy([], [])
    taken, state.rows = state.rows[:size], state.rows[: int(twice)] + state.rows[size:]
    state.made += 1
    lag = np.array([state.made - 1 - row.tag for row in taken], np.int32)
    return Greedy([Step(tuple(taken), np.array(state.made - 1, np.int64), lag)], [])


@fold(lifetime="step", collect=("trajectory", "step"))
def drops_all(state: Taken, ready: Annotated[Row | None, Rows("trajectory")]) -> Greedy:
    return Greedy([], [] if ready is None else [Dropped(ready, "no good")])
