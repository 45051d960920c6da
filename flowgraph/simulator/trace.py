"""What happened, measured: averages over time, lags, and a point of the plot a step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowgraph.runtime.rows import Record

# What is averaged over time, in the order of `Meter.levels`.
LEVELS = ("in_flight", "ready", "queued", "running", "waiting", "serving", "training", "watermark")


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

    residence: the same as the integral of in_flight, but summed over trajectories, each by its own clock
    """

    def __init__(self, slots: int, engines: int) -> None:
        self.slots, self.engines = slots, engines
        self.now = self.began = self.step_began = 0.0
        self.step_area = [0.0] * len(LEVELS)
        self.area = [0.0] * len(LEVELS)
        self.lags: dict[int, int] = {}
        self.published: dict[int, int] = {}
        self.points: list[Point] = []
        self.since: dict[int, float] = {}
        self.finished, self.flights, self.residence = 0, 0.0, 0.0
        self.tokens = self.trajectories = self.steps = 0

    def to(
        self, now: float, in_flight: float, ready: float, queued: float,
        running: float, waiting: float, serving: float, training: float, watermark: float,
    ) -> None:  # fmt: skip
        """Time goes on to now; the levels are those that held until now."""
        seconds, self.now = now - self.now, now
        area = self.step_area
        area[0] += seconds * in_flight
        area[1] += seconds * ready
        area[2] += seconds * queued
        area[3] += seconds * running
        area[4] += seconds * waiting
        area[5] += seconds * serving
        area[6] += seconds * training
        area[7] += seconds * watermark

    def out(self, key: int) -> None:
        """A trajectory is in flight."""
        self.since[key] = self.now

    def back(self, key: int) -> None:
        """It is no more. Harmless when repeated."""
        began, now = self.since.pop(key, None), self.now
        if began is None:
            return
        self.finished += 1
        self.flights += now - began
        self.residence += now - (began if began > self.began else self.began)

    def step(self, record: Record, members: Sequence[Record], published: int) -> None:
        """A step is over. published: versions that the served weights were behind when it was made."""
        tokens = sum(one.row.dims["token"] for one in members)
        lags = [record.row.key - one.row.tag for one in members]
        for lag in lags:
            self.lags[lag] = self.lags.get(lag, 0) + 1
        self.published[published] = self.published.get(published, 0) + 1
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
        self.lags, self.published = {}, {}
        self.finished, self.flights, self.residence = 0, 0.0, 0.0
        self.tokens = self.trajectories = self.steps = 0
        self.began = self.now

    def stop(self) -> None:
        """The end: those that are still in flight have been so until now."""
        self.residence += sum(self.now - max(began, self.began) for began in self.since.values())
