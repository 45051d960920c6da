"""What a batch may still be made of: ready trajectories by unit, the oldest unit first, each step in O(log n).

A unit is what is taken or dropped together: a whole group, or with `groups: partial` one trajectory. It is as old as
its oldest member.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import msgspec

from flowgraph import Dropped, Row

SIBLING = "a member of its group came to nothing"


class Unit(msgspec.Struct):
    """tag: of its oldest member; scores: of the leaves of each member, where the policy looks at them"""

    tag: int
    rows: list[Row] = []
    scores: dict[int, list[float]] = {}


class Candidates(msgspec.Struct):
    """batch_id: of the next batch

    units: those with a member that is ready; arrived: members so far
    whole: heap of (tag, arrival of the last member, unit), and wholes: how many of them are still there
    oldest: heap of (tag, unit)
    open: tag → units that wait for a member; out: tag → trajectories in flight
    dead: dropped unit → members that are yet to come, and why it was dropped
    lost: reason → units dropped since the last batch
    expiring: trajectories that were too old for another batch, and not in it, when the last batch was made
    """

    batch_id: int = 0
    arrived: int = 0
    units: dict[int, Unit] = {}
    whole: list[tuple[int, int, int]] = []
    wholes: int = 0
    oldest: list[tuple[int, int]] = []
    open: dict[int, int] = {}
    out: dict[int, int] = {}
    dead: dict[int, tuple[int, str]] = {}
    lost: dict[str, int] = {}
    expiring: int = 0


def sent(state: Candidates, row: Row) -> None:
    """A trajectory is in flight."""
    state.out[row.tag] = state.out.get(row.tag, 0) + 1


def arrive(state: Candidates, row: Row, unit: int, size: int, scores: list[float]) -> list[Dropped]:
    """A trajectory is ready, or came to nothing. What is dropped for it: itself, or its unit with it.

    size: members of a unit
    """
    state.arrived += 1
    if row.tag in state.out:
        _less(state.out, row.tag)
    if unit in state.dead:
        left, reason = state.dead.pop(unit)
        if left > 1:
            state.dead[unit] = left - 1, reason
        return [Dropped(row, row.failed or reason)]
    if row.failed:
        if unit not in state.units:
            state.units[unit] = Unit(row.tag)
            state.open[row.tag] = state.open.get(row.tag, 0) + 1
        return [Dropped(row, row.failed), *kill(state, unit, size, SIBLING, came=1)]
    at = state.units.get(unit)
    if at is None or row.tag < at.tag:
        if at is not None:
            _less(state.open, at.tag)
        at = state.units.setdefault(unit, Unit(row.tag))
        at.tag = row.tag
        state.open[row.tag] = state.open.get(row.tag, 0) + 1
        heappush(state.oldest, (row.tag, unit))
    at.rows.append(row)
    if scores:
        at.scores[row.key] = scores
    if len(at.rows) == size:
        _less(state.open, at.tag)
        state.wholes += 1
        heappush(state.whole, (at.tag, state.arrived, unit))
    return []


def kill(state: Candidates, unit: int, size: int, reason: str, came: int = 0) -> list[Dropped]:
    """Drop a unit: those of it that are ready now, the others as they come. came: members that are gone already"""
    at = state.units.pop(unit)
    if len(at.rows) == size:
        state.wholes -= 1
    else:
        _less(state.open, at.tag)
    state.lost[reason] = state.lost.get(reason, 0) + 1
    if left := size - len(at.rows) - came:
        state.dead[unit] = left, reason
    return [Dropped(row, reason) for row in at.rows]


def older(state: Candidates, than: int) -> Iterator[int]:
    """Units of a tag below `than`, oldest first; whoever asks lets go of each."""
    while state.oldest and state.oldest[0][0] < than:
        tag, unit = heappop(state.oldest)
        if unit in state.units and state.units[unit].tag == tag:
            yield unit


def overdue(state: Candidates, tag: int) -> bool:
    """Whether a trajectory of this tag or an older one is in flight, or in a unit that waits for another."""
    return any(at <= tag for at in state.out) or any(at <= tag for at in state.open)


def take(state: Candidates, wanted: int) -> list[Unit]:
    """The oldest whole units, ties by arrival, and out of the candidates with them."""
    chosen: list[Unit] = []
    while len(chosen) < wanted:
        _, _, unit = heappop(state.whole)
        if unit in state.units:
            chosen.append(state.units.pop(unit))
    state.wholes -= wanted
    state.batch_id += 1
    state.lost.clear()
    return chosen


def expiring(state: Candidates, than: int) -> int:
    """Trajectories, ready or in flight, of units of a tag below `than`: what a batch that is made now lets expire."""
    ready = sum(len(at.rows) for at in state.units.values() if at.tag < than)
    return ready + sum(n for tag, n in state.out.items() if tag < than)


def _less(counts: dict[int, int], tag: int) -> None:
    counts[tag] -= 1
    if not counts[tag]:
        del counts[tag]
