"""The watermark: how many trajectories are in flight, grown while training starves and shrunk while they only age.

A pure state machine without a clock. Its unit of time is the turnover: as many finished trajectories as the watermark,
so that what a change did has shown before the next one is made.
"""

from __future__ import annotations

import math

import msgspec

GROW, SHRINK, EASE = 1.25, 0.8, 0.95
CEILING = 0.9  # of the watermark that pressed the engine: as far as it grows again at first
RAISE = 1.005  # and by how much that rises each turnover, so that it is tried again after some twenty
CALM = 2  # turnovers without growth after it shrank


class Pace(msgspec.Struct):
    """watermark: 0 before the first call; ceiling: what it does not grow beyond, 0 while nothing is known

    finished: trajectories since the last turnover; of them bound: while as many as the watermark were in flight,
    starved: while training lacked them, pressed: while the engine had more than it could compute, idle: while half of
    what the watermark admits was ready already
    dropped: as stale, since the last turnover; calm: turnovers since it last shrank
    """

    watermark: float = 0.0
    ceiling: float = 0.0
    finished: int = 0
    bound: int = 0
    starved: int = 0
    pressed: int = 0
    idle: int = 0
    dropped: int = 0
    calm: int = CALM


def observe(
    pace: Pace, *, bound: bool, starved: bool, pressed: bool, idle: bool, least: int, most: int
) -> None:
    """A trajectory finished. least, most: between which the watermark stays.

    Of a turnover, the first of these that holds decides:
    - the engine was pressed for half of it: × 0.8, and it does not come near again soon
    - training starved: × 1.25, where the watermark was what bounded it, most of what came was not dropped, and it has
      not shrunk for two turnovers. Stragglers are dropped whatever is in flight: less would starve training more.
    - something was dropped as stale: × 0.8
    - half of what it admits was ready already, all the time: × 0.95
    What raises it and what lowers it can't hold both, after it shrank it waits, and it remembers what was too much: so
    it does not swing.
    """
    pace.finished += 1
    pace.bound += bound
    pace.starved += starved
    pace.pressed += pressed
    pace.idle += idle
    if pace.finished < pace.watermark:
        return
    wanted = pace.watermark
    pace.ceiling *= RAISE
    pace.calm += 1
    if 2 * pace.pressed >= pace.finished:
        pace.ceiling = CEILING * pace.watermark
        wanted, pace.calm = SHRINK * pace.watermark, 0
    elif pace.starved:
        bounds = 2 * pace.bound >= pace.finished and 2 * pace.dropped < pace.finished
        if bounds and not pace.pressed and pace.calm > CALM:
            grown = float(math.ceil(GROW * pace.watermark))
            wanted = max(pace.watermark, min(grown, pace.ceiling or grown))
    elif pace.dropped:
        wanted, pace.calm = SHRINK * pace.watermark, 0
    elif pace.idle == pace.finished:
        wanted = EASE * pace.watermark
    pace.watermark = float(min(most, max(least, wanted)))
    pace.finished = pace.bound = pace.starved = pace.pressed = pace.idle = pace.dropped = 0
