"""A ring in virtual time: the real driver and the real folds, and firings that end when a clock of our own says so.

Nothing waits and nothing depends on this machine, so thousands of orders of events can be tried.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from flowgraph import Dim, Dropped, Event, Latest, Row, Rows, Run, fold
from flowgraph.passes.pipeline import load
from flowgraph.plan.lower import lower
from flowgraph.plan.plan import Plan
from flowgraph.runtime.messages import Fire, FromWorker, ToWorker
from flowgraph.runtime.ring import Ring
from flowgraph.runtime.seats import seats
from flowgraph.runtime.transport import Transport, arenas
from flowgraph.runtime.worker import Worker
from hops.dispatch import Dispatched, InFlight, _room, watermark
from tests.runtime.generated import GeneratedWorker, Observed, generating
from tests.runtime.harness import TOY

Duration = Callable[[str], float]


@fold(lifetime="consumed", expand=("group", "trajectory"), room=_room)
def drip(
    state: InFlight,
    group: Annotated[Row | None, Rows("group")],
    finished: Annotated[Row | None, Rows("trajectory"), Event()],
    version: Annotated[int, Latest()],
    free: Annotated[int, Latest()],
    dropped: Annotated[Dropped | None, Event()] = None,
    *,
    groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    steps: Annotated[int, Run("steps")],
    target: int = 1 << 30,
) -> Dispatched:
    """`watermark` without its gate on the version: only `target` and the buffer's free capacity bound it."""
    sizes: dict[str, Any] = {"groups": groups, "samples": samples}
    ungated: dict[str, Any] = {"max_lag": steps, "steps": 2 * steps, "seed": 0, "target": target}
    sent: Dispatched = watermark(state, group, finished, version, free, dropped, **sizes, **ungated)
    return sent


class Simulated:
    """An executor whose clock is `now`. A firing ends after the time that `duration` draws for its hop.

    in_order: hops whose firings never overtake one another
    each_turn: called before every wait, when the driver has done all that it can
    """

    def __init__(self, duration: Duration, in_order: tuple[str, ...], each_turn: Callable[[], None]) -> None:
        self.control_bytes = 0
        self.now = 0.0
        self.duration, self.in_order, self.each_turn = duration, in_order, each_turn
        self.loop = asyncio.new_event_loop()
        self.workers: dict[str, Worker] = {}
        self.replies: list[tuple[str, FromWorker]] = []
        self.ends: list[tuple[float, int, str, Fire]] = []
        self.last: dict[str, float] = {}
        self.count = itertools.count()

    def start(self, plan: Plan, models: Mapping[str, str], memory: Transport) -> None:
        for owner in seats(plan):
            held = memory.open(owner, plan.owners)
            worker = GeneratedWorker(plan, owner, models, held, functools.partial(self._reply, owner))
            self.loop.run_until_complete(worker.start())
            self.workers[owner] = worker

    def _reply(self, owner: str, message: FromWorker) -> None:
        self.replies.append((owner, message))

    def send(self, owner: str, message: ToWorker) -> None:
        assert isinstance(message, Fire)
        hop = message.hop
        self.workers[owner].desk.free(message.over)  # firings end in another order than they are sent in
        message = msgspec.structs.replace(message, over={})
        end = self.now + self.duration(hop)
        if hop in self.in_order:
            end = self.last[hop] = max(end, self.last.get(hop, 0.0))
        heapq.heappush(self.ends, (end, next(self.count), owner, message))

    def wait(self, seconds: float) -> list[tuple[str, FromWorker]]:
        """What the next firing to end replies. It reads its inputs only now, so what was freed too early shows."""
        self.each_turn()
        if not self.replies:
            self.now, _, owner, message = heapq.heappop(self.ends)
            self.loop.run_until_complete(self._handle(self.workers[owner], message))
        out = self.replies[:]
        self.replies.clear()
        return out

    async def _handle(self, worker: Worker, message: Fire) -> None:
        worker.handle(message)
        await asyncio.gather(*worker.tasks.values())

    def stop(self, grace: float) -> None:
        self.loop.close()


def simulate(
    *overrides: str, duration: Duration, in_order: tuple[str, ...] = ()
) -> tuple[Ring, list[dict[str, Any]]]:
    """Run the toy ring in virtual time; the driver, and the records of its steps. Conservation is checked every turn.

    Also that what is dispatched and neither trained nor dropped stays within (max_lag + 1)·B (case S1).
    """
    loaded = load(TOY, overrides)
    assert not loaded.diagnostics, loaded.diagnostics
    assert loaded.graph is not None
    plan = lower(loaded.graph)
    batch = plan.dims["group"].max * plan.dims["sample"].max

    def each_turn() -> None:
        counts = ring.ledger.counts
        ring.check()
        untrained = counts.in_flight + counts.ready + counts.consumed - ring.steps_done * batch
        assert untrained <= (plan.max_lag + 1) * batch

    told = Observed()
    with generating(), arenas(plan, alone=True) as memory:
        executor = Simulated(duration, in_order, each_turn)
        ring = Ring(plan, executor, {}, memory, told)
        try:
            executor.start(plan, {}, memory)
            ring.start()
            ring.run()
        finally:
            executor.stop(0)
    return ring, told.steps


def heavy_tailed(rng: np.random.Generator, straggler: float) -> float:
    """A time of about 1 that now and then is ten times that, and with probability `straggler` a hundred steps long."""
    return 100.0 if rng.random() < straggler else float(rng.pareto(1.2)) + 0.05
