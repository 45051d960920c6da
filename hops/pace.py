"""The watermark: how many trajectories are in flight, grown while training starves and shrunk while they only age.

A pure state machine without a clock. Its unit of time is the turnover: as many finished trajectories as the watermark,
so that what a change did has shown before the next one is made.
"""

from __future__ import annotations

import math

import msgspec

GROW, SHRINK, EASE = 1.25, 0.8, 0.95


class Pace(msgspec.Struct):
    """watermark: 0 before the first call

    finished: trajectories since the last turnover; of them bound: while as many as the watermark were in flight,
    starved: while training lacked them, pressed: while the engine had more than it could compute, idle: while a whole
    batch more than training works on was ready
    dropped: as stale, since the last turnover; calm: turnovers since it last shrank
    """

    watermark: float = 0.0
    finished: int = 0
    bound: int = 0
    starved: int = 0
    pressed: int = 0
    idle: int = 0
    dropped: int = 0
    calm: int = 2


def observe(
    pace: Pace, *, bound: bool, starved: bool, pressed: bool, idle: bool, least: int, most: int
) -> None:
    """A trajectory finished. least, most: between which the watermark stays.

    Of a turnover, the first of these that holds decides:
    - the engine was pressed for half of it: × 0.8
    - something was dropped as stale: × 0.8
    - training starved, the watermark was what bounded it, and it has not shrunk for two turnovers: × 1.25
    - training never starved, and a whole batch too many was ready all the time: × 0.95
    What raises it and what lowers it can't hold both, and after it shrank it waits, so that it does not swing.
    """
    pace.finished += 1
    pace.bound += bound
    pace.starved += starved
    pace.pressed += pressed
    pace.idle += idle
    if pace.finished < pace.watermark:
        return
    factor = 1.0
    if 2 * pace.pressed >= pace.finished or pace.dropped:
        factor = SHRINK
    elif pace.starved and 2 * pace.bound >= pace.finished and not pace.pressed and pace.calm >= 2:
        factor = GROW
    elif not pace.starved and pace.idle == pace.finished:
        factor = EASE
    pace.calm = 0 if factor == SHRINK else pace.calm + 1
    wanted = pace.watermark * factor
    rounded = math.ceil(wanted) if factor > 1 else wanted
    pace.watermark = float(min(most, max(least, rounded)))
    pace.finished = pace.bound = pace.starved = pace.pressed = pace.idle = pace.dropped = 0
