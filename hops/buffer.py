"""The ready buffer: finished trajectories, one by one, until a batch takes them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from flowgraph import Dim, Dropped, Event, Latest, Room, Row, Rows, Seam, fold


class Ready(msgspec.Struct):
    """The ready ledger, in order of arrival."""

    rows: list[Row] = []


class Buffered(NamedTuple):
    ready: Annotated[tuple[Row, ...], Rows("trajectory"), Latest()]
    free: Annotated[Room, Latest()]


def _capacity(capacity: int | None, groups: int, samples: int, max_lag: int) -> int:
    return capacity if capacity is not None else (max_lag + 1) * groups * samples


def _room(state: Ready, *, capacity: int | None, groups: int, samples: int, max_lag: int) -> int:
    """What was sampled is never kept out: one that waits for room may be just the one that completes a batch."""
    return max(1, _capacity(capacity, groups, samples, max_lag) - len(state.rows))


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

    `finished` of dispatch and `trajectory` here want the same hop: what is at neither is not counted.

    capacity: trajectories, in flight ones included; default (max_lag + 1)·B.
    Gives `ready`, all that wait in order of arrival, and `free`, how many may be in flight.
    """
    if trajectory is not None:
        state.rows.append(trajectory)
    gone = set() if taken is None else {row.key for row in taken.parents}
    if dropped is not None:
        gone.add(dropped.row.key)
    if gone:
        state.rows = [row for row in state.rows if row.key not in gone]
    free = _capacity(capacity, groups, samples, max_lag) - len(state.rows)
    return Buffered(tuple(state.rows), Room(free))
