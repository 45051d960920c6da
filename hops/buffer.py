"""The ready buffer: finished trajectories, one by one, until a batch takes them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from flowgraph import Dim, Dropped, Event, Latest, Room, Row, Rows, Seam, fold


class Ready(msgspec.Struct):
    """The ready ledger. Who they are is known to the driver's table, and to the batch that they are handed to."""

    held: int = 0


class Buffered(NamedTuple):
    ready: Annotated[list[Row], Rows("trajectory")]
    free: Annotated[Room, Latest()]


def _room(state: Ready, *, capacity: int | None, groups: int, samples: int, max_lag: int) -> int:
    """What was sampled is never kept out: one that waits for room may be just the one that completes a batch."""
    return max(1, (capacity or (max_lag + 1) * groups * samples) - state.held)


def _validate(*, capacity: int | None = None) -> None:
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")


@fold(lifetime="consumed", room=_room, validate=_validate)
def ready(
    state: Ready,
    trajectory: Annotated[Row | None, Rows("trajectory")],
    taken: Annotated[Row | None, Rows("step"), Event()],
    dropped: Annotated[Dropped | None, Event()] = None,
    *,
    groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    max_lag: Annotated[int, Seam("version", "max_lag")],
    capacity: int | None = None,
) -> Buffered:
    """Hold finished trajectories. Nothing is evicted: when the buffer is full, dispatch sends no more.

    `finished` of dispatch and `trajectory` here want the same hop: what is at neither is not counted. One that came to
    nothing takes no room, and goes on to the batch, which drops it with its group.

    capacity: trajectories, in flight ones included; default (max_lag + 1)·B.
    Gives `ready`, each as it comes, and `free`, how many may be in flight.
    """
    if trajectory is not None and not trajectory.failed:
        state.held += 1
    if taken is not None:
        state.held -= len(taken.parents)
    if dropped is not None and not dropped.row.failed:
        state.held -= 1
    free = (capacity or (max_lag + 1) * groups * samples) - state.held
    return Buffered([] if trajectory is None else [trajectory], Room(free))
