"""What a run measures of itself: payload bytes by port, idle shares, lags, depths, and one record a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from flowgraph.plan.measured import Copied, Measured
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime.depths import Depths, Span
from flowgraph.runtime.flow import Flow
from flowgraph.runtime.messages import Block
from flowgraph.runtime.rows import Record
from flowgraph.runtime.shares import Shares


class Meter:
    """Totals since the start. Bytes are counted where they are read and written, by whoever did it.

    sizes: reader → writer → sizes of a block → how many such blocks it read
    lags: lag → trajectories trained on; behind: step → versions that the served weights were behind when it was trained
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.publisher = next((hop for hop in plan.hops.values() if hop.initial), None)
        takes = self.publisher.takes if self.publisher else frozenset()
        self.trainers = {name for name in takes if plan.hops[name].kind != "fold"}
        self.read: dict[str, int] = {}
        self.wrote: dict[str, int] = {}
        self.driver_bytes = 0
        self.copied = Copied({}, {}, {})
        self.sizes: dict[str, dict[str, dict[tuple[int, ...], int]]] = {}
        self.lags: Counter[int] = Counter()
        self.behind: dict[int, int] = {}
        self.start()

    def start(self) -> None:
        """The clock of the first step begins now."""
        self.began = self.step_began = time.monotonic()
        self.shares = Shares(self.plan, self.began)
        self.of_run, self.of_step = Span(self.began, Depths()), Span(self.began, Depths())

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def look(self, flow: Flow) -> None:
        """The driver has done all that it can, and waits: who is busy, and how deep are the queues?"""
        now, depths = time.monotonic(), self.depths(flow)
        waiting = {name for queues in (flow.ready, flow.triggers) for name, queue in queues.items() if queue}
        self.shares.look(now, waiting | flow.folds.waiting().keys(), flow.denied())
        self.of_run.set(now, depths)
        self.of_step.set(now, depths)

    def wake(self) -> None:
        """Messages have come."""
        self.shares.wake(time.monotonic())

    def depths(self, flow: Flow) -> Depths:
        counts = flow.ledger.counts
        training = sum(bool(flow.firing[self._head(name)]) for name in self.trainers)
        return Depths(counts.in_flight, counts.ready, max(0, self._untrained(flow) - training))

    def _head(self, hop: str) -> str:
        """The hop that fires for it."""
        return (self.plan.hops[hop].group or (hop,))[0]

    def _untrained(self, flow: Flow) -> int:
        """Batches that were made, and of which there are no weights yet."""
        steps = flow.table.live["step"].values()
        return sum(not self.trainers.isdisjoint(step.stage.left) for step in steps)

    def trains(self, hop: Hop, record: Record, flow: Flow) -> None:
        """A hop begins; where it trains: how many batches are trained whose weights the engine does not serve yet."""
        if self.publisher is None or self.trainers.isdisjoint(hop.group or (hop.name,)):
            return
        version = flow.folds.latest[self.publisher.name, next(iter(self.publisher.initial))]
        self.behind[record.row.key] = int(record.row.key - version)

    def count_read(self, hop: Hop, read: Mapping[str, int], joined: Collection[str], driver: int) -> None:
        """Payload that a hop read. joined: ports that took a copy; driver: of the bytes, see `Part`."""
        _add(self.read, hop, read)
        _add(self.copied.reader, hop, {port: read[port] for port in joined})
        self.driver_bytes += driver

    def count_written(self, hop: Hop, wrote: Mapping[str, int], placed: Collection[str] = ()) -> None:
        """Payload that a hop wrote. placed: columns that it wrote into its block itself."""
        _add(self.wrote, hop, wrote)
        _add(self.copied.writer, hop, {name: n for name, n in wrote.items() if name not in placed})

    def count_relayed(self, hop: Hop, wrote: Mapping[str, int]) -> None:
        """What a hop wrote went on into the driver's memory."""
        _add(self.copied.driver, hop, wrote)
        self.driver_bytes += sum(wrote.values())

    def lengths(self, reader: Hop, writer: str, blocks: Iterable[Block]) -> None:
        """The sizes of what a reader gets of a writer, for a prediction at the lengths that there really were."""
        found = self.sizes.setdefault(reader.name, {}).setdefault(writer, {})
        once = any(one.once and one.producer == writer for one in reader.reads)
        for block in dict.fromkeys(blocks) if once else blocks:
            found[block.sizes] = found.get(block.sizes, 0) + 1

    def measured(self, steps: int, control_bytes: int) -> Measured:
        lengths = {
            reader: {
                writer: {",".join(map(str, one)): n for one, n in found.items()}
                for writer, found in writers.items()
            }
            for reader, writers in self.sizes.items()
        }
        return Measured(steps, self.read, self.wrote, control_bytes, self.driver_bytes, lengths, self.copied)

    def step(self, record: Record, members: Sequence[Record], flow: Flow) -> dict[str, Any]:
        """The record of a step that is over: its size, speed and lags, the ledger, every hop's scalars, and what folds
        say of themselves now, such as dispatch.watermark.

        Scalars of a trajectory's hops are averaged over the trajectories that have them.
        """
        now = time.monotonic()
        tokens = sum(one.row.dims.get("token", 0) for one in members)
        lags = Counter(record.row.key - one.row.tag for one in members)
        took, self.step_began = now - self.step_began, now
        depths, of_step = self.depths(flow), self.of_step.told(now)
        self.of_step = Span(now, depths)
        self.lags.update(lags)
        return {
            "step": record.row.key + 1,
            "seconds": self.seconds,
            "step_seconds": round(took, 3),
            "tokens": tokens,
            "tokens_per_second": round(tokens / max(1e-9, took), 1),
            "lag_mean": sum(lag * n for lag, n in lags.items()) / max(1, len(members)),
            "lag_max": max(lags, default=0),
            "lags": dict(sorted(lags.items())),
            "weights_lag": self.behind.pop(record.row.key, 0),
            **depths._asdict(),
            "depths": of_step,
            "dropped": dict(flow.ledger.counts.dropped),
            "shares": self.shares.step(now),
            "arenas": {owner: gauge.now() for owner, gauge in flow.table.gauges.items() if gauge.size},
            **_mean([one.scalars for one in members]),
            **record.scalars,
            **self._levels(flow),
        }

    def _levels(self, flow: Flow) -> dict[str, int]:
        """The numbers that folds show."""
        shown = flow.folds.latest.items()
        return {
            f"{producer}.{output}": value
            for (producer, output), value in shown
            if self.plan.hops[producer].kind == "fold" and isinstance(value, int)
        }

    def run(self, flow: Flow) -> dict[str, Any]:
        """The same of the whole run."""
        now = time.monotonic()
        busy = self.shares.busy_seconds(now)
        return {
            "busy_seconds": {owner: round(seconds, 3) for owner, seconds in busy.items()},
            "shares": self.shares.run(now),
            "lags": dict(sorted(self.lags.items())),
            "depths": self.of_run.told(now),
            "arenas": {owner: gauge.run() for owner, gauge in flow.table.gauges.items() if gauge.size},
        }


def _add(total: dict[str, int], hop: Hop, nbytes: Mapping[str, int]) -> None:
    for name, n in nbytes.items():
        total[f"{hop.name}.{name}"] = total.get(f"{hop.name}.{name}", 0) + n


def _mean(scalars: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in scalars for name in one)
    values = {name: [one[name] for one in scalars if name in one] for name in names}
    return {name: sum(v) / len(v) for name, v in values.items()}
