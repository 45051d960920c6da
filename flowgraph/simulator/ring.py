"""A ring under virtual time: the rows, folds and ledger of a real run, and firings that end when a clock says so.

What a firing costs, by what the plan says of its hop:

    an effect of an engine on trajectories      a request to the engines; it ends when they have decoded it
    without any: what writes their tokens       the same
    the hop that writes weights                 train_seconds + tokens / train_rate
    the hop that publishes a version            sync_seconds, in which all engines stand still
    any other                                   what `seconds` says, else nothing
"""

from __future__ import annotations

import functools
import gc
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

import numpy as np

from flowgraph.engines.protocol import HIGH_MARK
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime.flow import Flow
from flowgraph.runtime.folds import Fold
from flowgraph.runtime.leases import no_regions
from flowgraph.runtime.rows import Record, Table
from flowgraph.simulator.engines import Fleet, Request
from flowgraph.simulator.facts import Sampler, computes_anew, source, trains
from flowgraph.simulator.lengths import BLOCK, Drawn, Lengths, parse_share
from flowgraph.simulator.settings import Fitted
from flowgraph.simulator.trace import Meter
from flowgraph.spec.types import Row

FAILED = "failed"


class Ring(Flow):
    """Drives a plan's folds under a virtual clock.

    now: seconds; soon, later: what happens now, and at a time of its own
    begun: steps whose training has begun; training: how many are being trained; version: of the served weights
    behind: step → versions that the served weights were behind when its training began
    samplers: hops that make requests
    again: hops that publish weights, after which what is under way has its KV computed anew
    """

    def __init__(self, plan: Plan, fitted: Fitted) -> None:
        super().__init__(plan, Table(plan, no_regions(plan)))
        self.settings, self.failures = fitted.settings, fitted.settings.failures
        self.now = 0.0
        self.fleet = Fleet(fitted.engines, fitted.slots, self.settings.speed, fitted.kv)
        self.meter = Meter(fitted.slots, fitted.engines)
        self._draw(fitted)
        self.soon: deque[Callable[[], None]] = deque()
        self.later: list[tuple[float, int, Callable[[], None]]] = []
        self.count = self.begun = self.training = self.version = self.warmup = 0
        self.behind: dict[int, int] = {}
        self.samplers = fitted.samplers
        self.again = {h.name for h in plan.hops.values() if h.initial and computes_anew(h)}
        self.dispatch = next(h for h in plan.hops.values() if h.makes_rows and h.rows == "trajectory")
        self.watermark = self.dispatch.name, "watermark"
        self.open(_Absent())
        for fold in self.folds.all.values():
            if not fold.hop.watches:
                fold.step = source(fold.hop)

    def _draw(self, fitted: Fitted) -> None:
        """The sequences that all chance comes from, each of its own stream."""
        seed, uniform = self.settings.seed, lambda generator, _: generator.random(BLOCK)
        self.prompts = Lengths(fitted.prompts, most=fitted.most[0], seed=seed, stream=0)
        self.lengths = Lengths(fitted.lengths, most=fitted.most[1], seed=seed, stream=1)
        self.fates, self.tries = Drawn(uniform, seed, 2), Drawn(uniform, seed, 3)
        self.solved = Drawn(parse_share(self.settings.solve), seed, 4) if self.settings.solve else None

    def run(self, steps: int, warmup: int) -> None:
        """Until so many steps are over, of which the first are not measured.

        Raises RunError when nothing can happen any more, and what folds raise.
        """
        self.warmup = warmup
        with _uncollected():
            self.turn()
            while self.steps_done < steps:
                if self.soon:
                    self.soon.popleft()()
                elif not self._next():
                    continue
                self.turn()
        live = self.table.live["trajectory"].values()
        self.meter.stop(one.since for one in live if one.place == "in flight")

    def close(self) -> None:
        """What is still under way is let go of, so that nothing is in a cycle and memory is free at once."""
        self.soon.clear()
        self.later.clear()
        for engine in self.fleet.all:
            engine.running.clear()
            engine.waiting.clear()

    def _next(self) -> bool:
        """Let the next thing happen. Whether any fold may care."""
        decoded = self.fleet.next()
        other = self.later[0][0] if self.later else math.inf
        now = decoded if decoded < other else other
        if now == math.inf:
            raise self.stuck()
        if now > self.now:
            self._measure(now)
            self.now = now
        if other <= decoded:
            heappop(self.later)[2]()
            return True
        request = self.fleet.pop()
        if request is not None:
            self._sampled(request)
        return request is not None

    def _measure(self, now: float) -> None:
        """Levels as they are until now."""
        counts, fleet = self.ledger.counts, self.fleet
        watermark = self.folds.latest.get(self.watermark, self.dispatch.room or 0)
        queued = self.steps_made - self.begun
        levels = (
            counts.in_flight,
            queued,
            fleet.running,
            fleet.waiting,
            fleet.serving,
            self.training,
            watermark,
        )
        self.meter.to(now, counts.ready, levels)

    # --- what begins ------------------------------------------------------------------------------------------

    def begin(self, hop: Hop, record: Record) -> None:
        sampler = self.samplers.get(hop.name)
        if sampler is None:
            seconds = sum(self._cost(self.plan.hops[name], record) for name in hop.group or (hop.name,))
            self._after(seconds, functools.partial(self._over, hop, record))
            return
        row = record.row
        key, uid = row.key, row.parents[0].key
        tokens = self.lengths.at(key)
        if self.failures and self._fails(key):
            tokens = (tokens + 1) // 2
        request = Request(key, uid, self.prompts.at(uid), tokens, sampler, record)
        self.fleet.submit(request, self.now)
        if sampler.limit is not None:
            self._after(sampler.limit, functools.partial(self._too_late, request))

    def _fails(self, key: int) -> bool:
        """Whether a trajectory comes to nothing, halfway."""
        return self.fates.at(key) < self.failures

    def begin_on(self, hop: Hop, port: str, value: int) -> None:
        self._after(self.settings.seconds.get(hop.name, 0.0), functools.partial(self.done, hop, None, port))

    def working(self, hop: str) -> dict[int, Request]:
        return {one.key: one for one in self.fleet.requests() if one.by.hop.name == hop}

    def interrupt(self, hop: Hop, firing: Request) -> None:
        self.soon.append(functools.partial(self._interrupted, firing))

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        if seconds:
            heappush(self.later, (self.now + seconds, self.count, happens))
            self.count += 1
        else:
            self.soon.append(happens)

    def _cost(self, hop: Hop, record: Record) -> float:
        """Seconds that a hop takes. The trainer is at work from now on, or the engines stand still."""
        s = self.settings
        given = s.seconds.get(hop.name)
        if trains(hop):
            self.begun += 1
            self.training += 1
            self.behind[record.row.key] = record.row.key - self.version
            tokens = sum([one.row.dims.get("token", 0) for one in record.parents])
            return s.of_batch(tokens) if given is None else given
        if hop.initial:
            seconds = s.sync_seconds if given is None else given
            self.fleet.pause(self.now, seconds, again=hop.name in self.again)
            return seconds
        return given or 0.0

    # --- what ends --------------------------------------------------------------------------------------------

    def _sampled(self, request: Request) -> None:
        """The engines are done with a request."""
        sampler: Sampler = request.by
        record: Record = request.of
        hop, row = sampler.hop, record.row
        self.done(hop, record)
        if self.failures and self._fails(row.key):
            self.fail(record, hop, FAILED)
            return
        prompt, response = request.prompt, request.done
        lengths = prompt + response, prompt, response, 1
        dims = dict(row.dims)
        for name, i in sampler.known:
            dims[name] = lengths[i]
        record.row = Row(row.kind, row.key, row.parents, row.tag, dims, row.failed)
        for name in sampler.names:
            self.give(record, name)
        for output in sampler.backlogs:
            pressed = request.engine.kv > HIGH_MARK * self.fleet.kv or request.retractions > 0
            self.publish(hop.name, output, self.fleet.waiting + pressed)

    def _too_late(self, request: Request) -> None:
        """The time of a trajectory is over; nothing happens when it is done, or began anew, by then."""
        if self._given_up(request):
            self.fail(request.of, request.by.hop, "time limit")

    def _interrupted(self, request: Request) -> None:
        """A request is given up for now; it begins anew when dispatch holds its trajectory no more."""
        if self._given_up(request):
            self.park(request.of, request.by.hop)

    def _given_up(self, request: Request) -> bool:
        """The engines let go of a request; False when they have already."""
        if request.over:
            return False
        self.fleet.cancel(request, self.now)
        self.done(request.by.hop, request.of)
        return True

    def _over(self, hop: Hop, record: Record) -> None:
        """A firing that is no request is over."""
        row, names = record.row, hop.group or (hop.name,)
        self.training -= sum(trains(self.plan.hops[name]) for name in names)
        self.done(hop, record)
        for name in names:
            self.give(record, name)
        for name in names:
            for output in self.plan.hops[name].initial:
                self.version = row.key + 1
                self.publish(name, output, self.version)

    # --- what the flow asks -----------------------------------------------------------------------------------

    def write(self, record: Record, hop: Hop, item: Any) -> tuple[None, tuple[int, ...]]:
        record.since = self.now
        return None, ()

    def landed(self, record: Record) -> None:
        self.meter.back(record.since)

    def columns(self, fold: Fold, rows: Sequence[Row]) -> dict[str, dict[int, Any]]:
        """Whether a trajectory solved its task, as the score that a fold reads; nothing else is known of it."""
        return {read.port: {row.key: self._score(row) for row in rows} for read in fold.hop.reads}

    def _score(self, row: Row) -> Any:
        assert self.solved is not None, "fit sees to it"
        return np.full(1, self.tries.at(row.key) < self.solved.at(row.uid), np.float32)

    def closed(self, record: Record, members: Sequence[Record]) -> None:
        self.meter.step(record, members, self.behind.pop(record.row.key, 0))
        if self.steps_done == self.warmup:
            self.meter.restart()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: what a simulation lets go of is in no cycle, and all that is alive, a few objects
    for each of many thousand trajectories, would be looked through again and again.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():
                gc.freeze()  # all is among the old ones then, and is not looked through at the very end
                gc.unfreeze()
            gc.enable()


class _Absent(dict[str, Any]):
    """Resources that nobody uses: no hop runs but folds, and a source that would read a tokenizer is replaced."""

    def __missing__(self, key: str) -> None:
        return None
