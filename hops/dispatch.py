"""Dispatch: groups become trajectories, dripped toward a watermark, each under the version that is current."""

from __future__ import annotations

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
    Held,
    Latest,
    Room,
    Row,
    Rows,
    Run,
    Seam,
    Short,
    Version,
    fold,
)
from hops.keys import key_of
from hops.pace import Pace, observe

NO_BACKLOG = Backlog(0)
NOT_SHORT = Short(0)


class InFlight(msgspec.Struct):
    """The in-flight ledger, the group that is being sampled, and how the watermark comes about.

    held: of those in flight, how many of the youngest wait
    """

    group: Row | None = None
    sampled: int = 0
    in_flight: int = 0
    dispatched: int = 0
    dropped: int = 0
    held: int = 0
    pace: Pace = msgspec.field(default_factory=Pace)


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
    watermark: Annotated[int, Latest()]
    held: Annotated[Held, Latest()]


def _room(state: InFlight, **_: object) -> int:
    return 0 if state.group is not None else 1


def _admits(*, groups: int, samples: int, max_lag: int, **_: object) -> int:
    """See `watermark`: what is dispatched and not dropped is at most that much ahead of what is trained."""
    return (max_lag + 1) * groups * samples


def _flight(*, target: int | None, **sizes: int) -> int:
    return target or _admits(**sizes)


def _validate(*, target: int | None = None, adapt: bool = False, least: int | None = None) -> None:
    for name, value in (("target", target), ("least", least)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if least is not None and not adapt:
        raise ValueError("least bounds a watermark that adapts; add adapt: true")
    if least is not None and target is not None and least > target:
        raise ValueError(f"least is {least}, above the target of {target}")


@fold(
    lifetime="consumed",
    expand=("group", "trajectory"),
    room=_room,
    flight=_flight,
    admits=_admits,
    needs={"adapt": "short"},
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
    short: Annotated[Short, Latest()] = NOT_SHORT,
    *,
    groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    max_lag: Annotated[int, Seam("version", "max_lag")],
    steps: Annotated[int, Run("steps")],
    seed: Annotated[int, Run("seed")],
    target: int | None = None,
    adapt: bool = False,
    least: int | None = None,
) -> Dispatched:
    """Send out the next trajectories whenever one finishes, room appears or a version is published.

    None is sent beyond the watermark, nor beyond the ready buffer's free capacity, so a finished one always finds room.
    What is dispatched and not dropped stays within (version + max_lag + 1)·B: trained in order, the i-th
    trajectory is in batch i // B, so its lag is at most max_lag. One that came to nothing has left its slot.

    target: the watermark (default: what the lag admits, (max_lag + 1)·B), or with `adapt` the highest that it may be.
    adapt: the watermark starts at B and follows what is seen, within [least, target]; see `hops.pace.observe`. It
        bounds what is in flight and what is ready beyond the batch that is being trained, so that nothing waits long.
        When the engine is pressed and it sinks below what is in flight, the youngest wait until it has room for them.
    least: the lowest that it may be (default: samples).
    backlog: of the engine. While it has one, what finishes is not replaced, until it has caught up or nothing is in
    flight.
    short: of the batch, which says that training waits for trajectories.

    B = groups·samples trajectories. Gives one request a trajectory: uid i64, sample i32, trajectory i64, key u64.
    """
    batch = groups * samples
    most = target or (max_lag + 1) * batch
    pace = state.pace
    if not pace.watermark:
        pace.watermark = float(min(most, batch) if adapt else most)
    if group is not None:
        state.group, state.sampled = group, 0
    if dropped is not None:
        state.dropped += dropped.reason != "withheld"  # which takes its place in a batch all the same
        pace.dropped += dropped.reason in ("stale", "withheld")
    waits = 0
    if adapt:
        # What is ready beyond the batch that is trained: it counts as if it were in flight, for it only ages.
        waits = max(0, state.dispatched - state.in_flight - state.dropped - (version + 1) * batch)
    if finished is not None:
        if adapt:
            observe(
                pace,
                bound=state.in_flight + waits >= int(pace.watermark),
                starved=short == version + 1,
                pressed=backlog > 0,
                idle=2 * waits >= int(pace.watermark),
                least=min(most, least or samples),
                most=most,
            )
        state.in_flight -= 1
    mark = int(pace.watermark)
    at_once = mark - waits if mark - waits < free else free
    if backlog > 0:
        at_once = min(at_once, max(1, state.in_flight))
    admitted = min(version + max_lag + 1, steps) * batch + state.dropped
    requests = []
    while state.group is not None and state.dispatched < admitted and state.in_flight < at_once:
        requests.append(_request(state.group, state.sampled, state.dispatched, version, seed))
        state.dispatched += 1
        state.in_flight += 1
        state.sampled += 1
        if state.sampled == samples:
            state.group = None
    if backlog > 0 or state.held:
        above = max(0, state.in_flight - mark)
        state.held = above if backlog > 0 else min(state.held, above)
    return Dispatched(requests, state.in_flight, mark, Held(state.held))


def _request(group: Row, sample: int, trajectory: int, version: Version, seed: int) -> Request:
    uid = group.key
    return Request(
        (group,),
        version,
        np.array(uid, np.int64),
        np.array(sample, np.int32),
        np.array(trajectory, np.int64),
        np.array(key_of(f"{seed}/{uid}/{sample}"), np.uint64),
    )
