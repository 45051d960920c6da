"""What a batch may still be made of: trajectories by unit, the oldest unit first, each step in O(log n).

A unit is what is taken or dropped together: a whole group, or with `groups: partial` one trajectory. It is as old as
its oldest member.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec

from flowgraph import Dropped, Row

SIBLING = "a member of its group came to nothing"


class Unit(msgspec.Struct):
    """tag: of its oldest member; rows: members that are ready; out: those that are in flight, where that is told

    scores: of the leaves of each member, where the policy looks at them
    """

    tag: int
    rows: list[Row] = []
    out: int = 0
    scores: dict[int, list[float]] = {}


class Candidates(msgspec.Struct):
    """batch_id: of the next batch

    units: those with a member that is ready, or in flight; arrived: members so far
    whole: heap of (tag, arrival of the last member, unit); oldest: heap of (tag, unit)
    alive: tag → units; ready: tag → units that are whole; wholes: of any tag
    dead: dropped unit → members that are yet to come, and why it was dropped
    lost: what is to blame → units dropped since the last batch
    expiring: trajectories that were too old for another batch, and not in it, when the last batch was made
    """

    batch_id: int = 0
    arrived: int = 0
    units: dict[int, Unit] = {}
    whole: list[tuple[int, int, int]] = []
    oldest: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    ready: dict[int, int] = {}
    wholes: int = 0
    dead: dict[int, tuple[int, str]] = {}
    lost: dict[str, int] = {}
    expiring: int = 0


def sent(state: Candidates, row: Row, unit: int) -> None:
    """A trajectory is in flight."""
    if unit not in state.dead:
        _unit(state, row, unit).out += 1


def arrive(
    state: Candidates, row: Row, unit: int, size: int, scores: list[float] | None = None
) -> list[Dropped]:
    """A trajectory is ready, or came to nothing. What is dropped for it: itself, or its unit with it.

    size: members of a unit; scores: of its leaves, where the policy looks at them
    """
    state.arrived += 1
    if unit in state.dead:
        left, reason = state.dead.pop(unit)
        if left > 1:
            state.dead[unit] = left - 1, reason
        return [Dropped(row, row.failed or reason)]
    at = state.units.get(unit)
    if at is None or at.tag > row.tag:
        at = _unit(state, row, unit)
    if at.out:
        at.out -= 1
    if row.failed:
        return [Dropped(row, row.failed), *kill(state, unit, size, SIBLING, came=1, cause=row.failed)]
    at.rows.append(row)
    if scores:
        at.scores[row.key] = scores
    if len(at.rows) == size:
        state.wholes += 1
        state.ready[at.tag] = state.ready.get(at.tag, 0) + 1
        heappush(state.whole, (at.tag, state.arrived, unit))
    return []


def kill(
    state: Candidates, unit: int, size: int, reason: str, came: int = 0, cause: str = ""
) -> list[Dropped]:
    """Drop a unit: those of it that are ready now, the others as they come.

    came: members that are gone already; cause: what is to blame, where that is not the reason of the others
    """
    at = state.units[unit]
    _leave(state, unit, size)
    state.lost[cause or reason] = state.lost.get(cause or reason, 0) + 1
    if left := size - len(at.rows) - came:
        state.dead[unit] = left, reason
    return [Dropped(row, reason) for row in at.rows]


def older(state: Candidates, than: int) -> list[int]:
    """Units of a tag below `than` that have a member which is ready, oldest first; whoever asks lets go of them."""
    found = []
    while state.oldest and state.oldest[0][0] < than:
        tag, unit = heappop(state.oldest)
        if unit in state.units and state.units[unit].tag == tag:
            found.append(unit)
    return found


def in_time(state: Candidates, wanted: int, max_lag: int) -> bool:
    """Whether all units can still be in a batch before they are too old, when the next takes the oldest whole ones.

    After batch b, those of tag t or an older one have the batches b + 1 to t + max_lag, of `wanted` units each. When
    the dispatcher admits no more than that, and no batch leaves more, there is always a next batch: the one that takes
    the oldest of all, when they are there. What has no place even then is not waited for.
    """
    take, left, missing = wanted, 0, 0
    for tag in sorted(state.alive):
        taken = min(take, state.ready.get(tag, 0))
        take -= taken
        left += state.alive[tag] - taken
        missing += state.alive[tag] - state.ready.get(tag, 0)
        if missing and left > max(0, tag + max_lag - state.batch_id) * wanted:
            return False
    return True


def take(state: Candidates, wanted: int, size: int) -> list[Unit]:
    """The oldest whole units, ties by arrival, and out of the candidates with them."""
    chosen: list[Unit] = []
    while len(chosen) < wanted:
        _, _, unit = heappop(state.whole)
        if unit in state.units:
            chosen.append(state.units[unit])
            _leave(state, unit, size)
    state.batch_id += 1
    state.lost.clear()
    return chosen


def expiring(state: Candidates, than: int) -> int:
    """Trajectories, ready or in flight, of units of a tag below `than`: what a batch that is made now lets expire."""
    if not any(tag < than for tag in state.alive):
        return 0
    return sum(len(at.rows) + at.out for at in state.units.values() if at.tag < than)


def alike(scores: Sequence[float]) -> bool:
    """Whether scores differ by rounding at most, so that relative to each other they teach nothing."""
    return max(scores) - min(scores) <= 1e-6 * max(map(abs, scores))


def _unit(state: Candidates, row: Row, unit: int) -> Unit:
    """The unit of a trajectory that was sent or came, which makes it older, if anything."""
    at = state.units.get(unit)
    if at is not None and at.tag <= row.tag:
        return at
    if at is None:
        at = state.units[unit] = Unit(row.tag)
    else:
        _less(state.alive, at.tag)
        at.tag = row.tag
    state.alive[row.tag] = state.alive.get(row.tag, 0) + 1
    heappush(state.oldest, (row.tag, unit))
    return at


def _leave(state: Candidates, unit: int, size: int) -> None:
    at = state.units.pop(unit)
    _less(state.alive, at.tag)
    if len(at.rows) == size:
        state.wholes -= 1
        _less(state.ready, at.tag)


def _less(counts: dict[int, int], tag: int) -> None:
    counts[tag] -= 1
    if not counts[tag]:
        del counts[tag]
