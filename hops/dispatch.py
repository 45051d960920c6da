"""Dispatch: groups become trajectories, dripped toward a watermark, each under the version that is current."""

from __future__ import annotations

import hashlib
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int32, Int64, UInt64

from flowgraph import (
    Array,
    Backlog,
    Below,
    Dim,
    Dropped,
    Event,
    Latest,
    Room,
    Row,
    Rows,
    Run,
    Seam,
    Version,
    fold,
)

NO_BACKLOG = Backlog(0)


class InFlight(msgspec.Struct):
    """The in-flight ledger, and the group that is being sampled."""

    group: Row | None = None
    sampled: int = 0
    in_flight: int = 0
    dispatched: int = 0
    dropped: int = 0


class Request(NamedTuple):
    """One trajectory to sample. key alone decides its randomness; uid, sample and trajectory say who it is."""

    parents: tuple[Row, ...]
    tag: int
    uid: Int64[Array, ""]
    sample: Annotated[Int32[Array, ""], Below("sample")]
    trajectory: Int64[Array, ""]
    key: UInt64[Array, ""]


class Dispatched(NamedTuple):
    request: Annotated[list[Request], Rows("trajectory")]
    in_flight: Annotated[int, Latest()]


def random_key(seed: int, uid: int, sample: int) -> int:
    """64 bits that depend on the run's seed and on who the trajectory is, and on nothing else."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _room(state: InFlight, **_: object) -> int:
    return 0 if state.group is not None else 1


def _flight(*, target: int | None, groups: int, samples: int, max_lag: int, **_: object) -> int:
    return target or (max_lag + 1) * groups * samples


def _admits(*, groups: int, samples: int, max_lag: int, **_: object) -> int:
    """See `watermark`: what is dispatched and not dropped is at most that much ahead of what is trained."""
    return (max_lag + 1) * groups * samples


def _validate(*, target: int | None = None) -> None:
    if target is not None and target < 1:
        raise ValueError(f"target must be at least 1, not {target}")


@fold(
    lifetime="consumed",
    expand=("group", "trajectory"),
    room=_room,
    flight=_flight,
    admits=_admits,
    validate=_validate,
)
def watermark(
    state: InFlight,
    group: Annotated[Row | None, Rows("group")],
    finished: Annotated[Row | None, Rows("trajectory"), Event()],
    version: Annotated[Version, Latest()],
    free: Annotated[Room, Latest()],
    dropped: Annotated[Dropped | None, Event()] = None,
    backlog: Annotated[Backlog, Latest()] = NO_BACKLOG,
    *,
    groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    max_lag: Annotated[int, Seam("version", "max_lag")],
    steps: Annotated[int, Run("steps")],
    seed: Annotated[int, Run("seed")],
    target: int | None = None,
) -> Dispatched:
    """Send out the next trajectories whenever one finishes, room appears or a version is published.

    In flight never exceeds `target` (default: what the lag admits) nor the ready buffer's free capacity, so
    a finished trajectory always finds room. What is dispatched and not dropped stays within
    (version + max_lag + 1)·B: trained in order, the i-th trajectory is in batch i // B, so its lag is at most max_lag.

    backlog: of the engine. While it has one, what finishes is not replaced, until it has caught up or nothing is in
    flight.

    B = groups·samples trajectories. Gives one request a trajectory: uid i64, sample i32, trajectory i64, key u64.
    """
    if group is not None:
        state.group, state.sampled = group, 0
    if finished is not None:
        state.in_flight -= 1
    if dropped is not None:
        state.dropped += 1
    batch = groups * samples
    admitted = min(version + max_lag + 1, steps) * batch + state.dropped
    at_once = min(_flight(target=target, groups=groups, samples=samples, max_lag=max_lag), free)
    if backlog > 0:
        at_once = min(at_once, max(1, state.in_flight))
    requests = []
    while state.group is not None and state.dispatched < admitted and state.in_flight < at_once:
        uid = state.group.uid
        requests.append(
            Request(
                parents=(state.group,),
                tag=version,
                uid=np.array(uid, np.int64),
                sample=np.array(state.sampled, np.int32),
                trajectory=np.array(state.dispatched, np.int64),
                key=np.array(random_key(seed, uid, state.sampled), np.uint64),
            )
        )
        state.dispatched += 1
        state.in_flight += 1
        state.sampled += 1
        if state.sampled == samples:
            state.group = None
    return Dispatched(requests, state.in_flight)
