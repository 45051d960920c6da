"""What a run measures of itself: payload bytes by port, seconds by owner, and one record a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowgraph.plan.measured import Measured
from flowgraph.plan.plan import Hop
from flowgraph.runtime.ledger import Counts
from flowgraph.runtime.messages import Block
from flowgraph.runtime.rows import Record


class Meter:
    """Totals since the start. Bytes are counted where they are read and written, by whoever did it.

    sizes: reader → writer → sizes of a block → how many such blocks it read
    """

    def __init__(self, owners: Sequence[str]) -> None:
        self.read: dict[str, int] = {}
        self.wrote: dict[str, int] = {}
        self.driver_bytes = 0
        self.sizes: dict[str, dict[str, dict[tuple[int, ...], int]]] = {}
        self.busy = dict.fromkeys(owners, 0.0)
        self._at_work: dict[str, tuple[int, float]] = dict.fromkeys(owners, (0, 0.0))
        self.start()

    def start(self) -> None:
        """The clock of the first step begins now."""
        self.began = self.step_began = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def begins(self, owner: str) -> None:
        """A firing is sent to an owner. It is busy while it has at least one, however many."""
        n, since = self._at_work[owner]
        self._at_work[owner] = (n + 1, since if n else time.monotonic())

    def ends(self, owner: str) -> None:
        n, since = self._at_work[owner]
        self._at_work[owner] = (n - 1, since)
        if n == 1:
            self.busy[owner] += time.monotonic() - since

    def count(
        self, hop: Hop, read: Mapping[str, int], wrote: Mapping[str, int], homes: Mapping[str, int]
    ) -> None:
        """Payload that a hop read and wrote. homes: the bytes read, by the owner in whose memory they lie."""
        for total, one in ((self.read, read), (self.wrote, wrote)):
            for name, n in one.items():
                total[f"{hop.name}.{name}"] = total.get(f"{hop.name}.{name}", 0) + n
        self.driver_bytes += sum(
            n for home, n in homes.items() if (home == "driver") != (hop.owner == "driver")
        )

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
        return Measured(steps, self.read, self.wrote, control_bytes, self.driver_bytes, lengths)

    def step(self, record: Record, members: Sequence[Record], counts: Counts) -> dict[str, Any]:
        """The record of a step that is over: its size, speed and lag, the ledger, and every hop's scalars.

        Scalars of a trajectory's hops are averaged over the trajectories that have them.
        """
        now = time.monotonic()
        tokens = sum(one.row.dims.get("token", 0) for one in members)
        lags = [record.row.key - one.row.tag for one in members]
        took, self.step_began = now - self.step_began, now
        return {
            "step": record.row.key + 1,
            "seconds": self.seconds,
            "step_seconds": round(took, 3),
            "tokens": tokens,
            "tokens_per_second": round(tokens / max(1e-9, took), 1),
            "lag_mean": sum(lags) / max(1, len(lags)),
            "lag_max": max(lags, default=0),
            "in_flight": counts.in_flight,
            "ready": counts.ready,
            "dropped": sum(counts.dropped.values()),
            **_mean([one.scalars for one in members]),
            **record.scalars,
        }


def _mean(scalars: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in scalars for name in one)
    values = {name: [one[name] for one in scalars if name in one] for name in names}
    return {name: sum(v) / len(v) for name, v in values.items()}
