"""A ring of real folds, rows and ledger, whose firings end when a test says so: no payload, no clock, no process."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from flowgraph.passes.pipeline import load
from flowgraph.plan.lower import lower
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime.flow import Flow
from flowgraph.runtime.folds import Fold
from flowgraph.runtime.leases import no_regions
from flowgraph.runtime.rows import Record, Table
from flowgraph.spec.types import Row
from tests.runtime.harness import TOY

# The toy ring with a real engine's signature, so that its rollouts may be interrupted.
ENGINE = (
    "owners.rollout.engine={use: transformers, model: smollm2-135m, slots: 4}",
    "hops.rollout={use: hops.rollout.complete, in: {prompt: dispatch, key: dispatch}}",
)


@functools.cache
def plan_of(*overrides: str) -> Plan:
    loaded = load(TOY, overrides)
    assert not loaded.diagnostics, loaded.diagnostics
    assert loaded.graph is not None
    return lower(loaded.graph)


class Virtual(Flow):
    """Firings under way are in `firings`, in the order in which they began; `ends` ends one.

    scores: what each trajectory scores, where a fold asks; taught: keys of each step that is over, and their lags
    told_to_stop: firings that were interrupted, and have not stopped yet
    """

    def __init__(self, plan: Plan, scores: Mapping[int, float] | None = None) -> None:
        super().__init__(plan, Table(plan, no_regions(plan)))
        self.firings: dict[tuple[str, int], tuple[Hop, Record]] = {}
        self.events: list[tuple[Hop, str]] = []
        self.scores = scores or {}
        self.taught: list[list[int]] = []
        self.lags: list[list[int]] = []
        self.told_to_stop: list[tuple[str, int]] = []
        self.open({"engine": None, "learner": None, "tokenizer": None})
        self.turn()

    def columns(self, fold: Fold, rows: Sequence[Row]) -> dict[str, dict[int, Any]]:
        scores = {row.key: np.array([self.scores.get(row.key, row.key % 2)], np.float32) for row in rows}
        return {read.port: dict(scores) for read in fold.hop.reads}

    def write(self, record: Record, hop: Hop, item: Any) -> tuple[None, tuple[int, ...]]:
        return None, ()

    def begin(self, hop: Hop, record: Record) -> None:
        self.firings[hop.name, record.row.key] = hop, record

    def begin_on(self, hop: Hop, port: str, value: int) -> None:
        self.events.append((hop, port))

    def working(self, hop: str) -> dict[int, Record]:
        return {key: record for (name, key), (_, record) in self.firings.items() if name == hop}

    def interrupt(self, hop: Hop, firing: Record) -> None:
        self.told_to_stop.append((hop.name, firing.row.key))

    def closed(self, record: Record, members: Sequence[Record]) -> None:
        self.taught.append([one.row.key for one in members])
        self.lags.append([record.row.key - one.row.tag for one in members])

    # --- what a test lets happen ------------------------------------------------------------------------------

    def keys(self, hop: str) -> list[int]:
        return [key for name, key in self.firings if name == hop]

    def ends(self, hop: str, key: int, failed: str = "") -> None:
        """A firing ends, or comes to nothing."""
        at, record = self._ended(hop, key)
        if failed:
            self.fail(record, at, failed)
        else:
            for name in at.group or (at.name,):
                self.give(record, name)
                for output in self.plan.hops[name].initial:
                    self.publish(name, output, record.row.key + 1)
        self.turn()

    def stops(self, hop: str, key: int) -> None:
        """A firing that was interrupted has stopped."""
        at, record = self._ended(hop, key)
        self.park(record, at)
        self.turn()

    def _ended(self, hop: str, key: int) -> tuple[Hop, Record]:
        at, record = self.firings.pop((hop, key))
        self.told_to_stop = [one for one in self.told_to_stop if one != (hop, key)]
        self.done(at, record)
        return at, record

    def heard(self) -> None:
        """What fires on a published value ends."""
        at, port = self.events.pop(0)
        self.done(at, None, port)
        self.turn()

    def restart(self) -> None:
        """Every fold goes on from what was written down of its state."""
        for fold in self.folds.all.values():
            stored = msgspec.msgpack.encode(fold.state)
            fold.state = msgspec.msgpack.decode(stored, type=type(fold.state))

    def state(self, fold: str) -> Any:
        return self.folds.all[fold].state


def in_time(flow: Virtual, seconds: Callable[[str, Record], float]) -> float:
    """Let every firing end after the seconds that it takes, until the run is over; the seconds of the run."""
    now, began, ends = 0.0, itertools.count(), []
    known: set[tuple[str, int]] = set()
    while not flow.finished():
        for at in flow.firings.keys() - known:
            heapq.heappush(ends, (now + seconds(at[0], flow.firings[at][1]), next(began), at))
        known |= flow.firings.keys()
        while flow.events:
            flow.heard()
        if ends:
            now, _, at = heapq.heappop(ends)
            known.discard(at)
            flow.ends(*at)
    return now
