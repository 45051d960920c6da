"""What happened, measured: averages over time, lags, and a point of the plot a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from flowgraph.runtime.rows import Record

# What is averaged over time.
LEVELS = ("ready", "in_flight", "queued", "running", "waiting", "serving", "training", "watermark")


def spare(busy: float, of: float) -> float:
    """The share that is not busy; rounding makes it no less than 0."""
    return max(0.0, 1 - busy / of)


class Point(msgspec.Struct, frozen=True):
    """One step. at: when it was over; seconds: since the one before, over which the rest is averaged

    in_flight, ready: trajectories; watermark: that dispatch wants in flight; queued: batches that wait to be trained
    waiting: requests that wait for a slot; slots_empty, engines_idle, trainer_idle: shares, of 1
    lag_mean, lag_max: of the batch's trajectories, in versions
    """

    at: float
    seconds: float
    tokens: int
    lag_mean: float
    lag_max: int
    in_flight: float
    ready: float
    queued: float
    waiting: float
    watermark: float
    slots_empty: float
    engines_idle: float
    trainer_idle: float


class Meter:
    """Integrals of levels over virtual time, of the step that is under way and since the measured part began.

    levels: that hold now, and since `settled`; ready: the integral of what is, since then
    residence: the same as the integral of in_flight, but summed over trajectories, each by its own clock
    """

    def __init__(self, slots: int, engines: int) -> None:
        self.slots, self.engines = slots, engines
        self.now = self.began = self.step_began = 0.0
        self.step_area = [0.0] * len(LEVELS)
        self.area = [0.0] * len(LEVELS)
        self.levels: tuple[float, ...] = (0.0,) * (len(LEVELS) - 1)
        self.ready = self.settled = 0.0
        self.lags: Counter[int] = Counter()
        self.published: Counter[int] = Counter()
        self.points: list[Point] = []
        self.finished, self.flights, self.residence = 0, 0.0, 0.0
        self.tokens = self.trajectories = self.steps = 0

    def to(self, now: float, ready: float, levels: tuple[float, ...]) -> None:
        """Time goes on to now; ready, and the other levels in their order, are what held until now.

        What is ready changes with every trajectory; the others seldom do, and are added up when they have.
        """
        self.ready += (now - self.now) * ready
        if levels != self.levels:
            self._settle()
            self.levels = levels
        self.now = now

    def _settle(self) -> None:
        """Add what has held since it was added last."""
        seconds, self.settled = self.now - self.settled, self.now
        self.step_area[0] += self.ready
        self.ready = 0.0
        for i, level in enumerate(self.levels, 1):
            self.step_area[i] += seconds * level

    def back(self, began: float) -> None:
        """A trajectory that was dispatched then is in flight no more."""
        now = self.now
        self.finished += 1
        self.flights += now - began
        self.residence += now - (began if began > self.began else self.began)

    def step(self, record: Record, members: Sequence[Record], published: int) -> None:
        """A step is over. published: versions that the served weights were behind when it was made."""
        self._settle()
        tokens = sum([one.row.dims["token"] for one in members])
        lags = [record.row.key - one.row.tag for one in members]
        self.lags.update(lags)
        self.published[published] += 1
        seconds = self.now - self.step_began
        mean = dict(zip(LEVELS, (a / seconds if seconds else 0.0 for a in self.step_area), strict=True))
        self.points.append(
            Point(
                at=self.now,
                seconds=seconds,
                tokens=tokens,
                lag_mean=sum(lags) / max(1, len(lags)),
                lag_max=max(lags, default=0),
                slots_empty=spare(mean.pop("running"), self.slots * self.engines),
                engines_idle=spare(mean.pop("serving"), self.engines),
                trainer_idle=spare(mean.pop("training"), 1),
                **mean,
            )
        )
        self.area = [a + b for a, b in zip(self.area, self.step_area, strict=True)]
        self.step_area = [0.0] * len(LEVELS)
        self.step_began = self.now
        self.tokens += tokens
        self.trajectories += len(members)
        self.steps += 1

    def restart(self) -> None:
        """What was so far is not measured; the points of the plot stay."""
        self.area = [0.0] * len(LEVELS)
        self.lags, self.published = Counter(), Counter()
        self.finished, self.flights, self.residence = 0, 0.0, 0.0
        self.tokens = self.trajectories = self.steps = 0
        self.began = self.now

    def stop(self, flying: Iterable[float]) -> None:
        """The end. flying: when those that are in flight still were dispatched"""
        self.residence += sum(self.now - max(began, self.began) for began in flying)
