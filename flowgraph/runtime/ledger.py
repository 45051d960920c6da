"""Where every trajectory is: dispatched = in flight + ready + consumed + dropped(reason), at every moment."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flowgraph.errors import LedgerError
from flowgraph.runtime.rows import Place, Record

MOVES: dict[Place, tuple[Place, ...]] = {"in flight": ("ready", "dropped"), "ready": ("consumed", "dropped")}
VERBS: dict[Place, str] = {"in flight": "dispatch", "ready": "take", "consumed": "choose", "dropped": "drop"}


class Counts(msgspec.Struct):
    """Trajectories by place, and why the dropped ones were."""

    dispatched: int = 0
    in_flight: int = 0
    ready: int = 0
    consumed: int = 0
    dropped: dict[str, int] = {}

    @property
    def events(self) -> int:
        """How often a trajectory was dispatched, left flight, was consumed or dropped."""
        return 2 * self.dispatched - self.in_flight + self.consumed + sum(self.dropped.values())


class Ledger:
    """Counts trajectories by place. Each move is checked; where one is, its record says."""

    def __init__(self) -> None:
        self.counts = Counts()

    def register(self, record: Record) -> None:
        """A trajectory was dispatched."""
        record.place = "in flight"
        self.counts.dispatched += 1
        self.counts.in_flight += 1

    def move(self, record: Record | None, key: int, to: Place, by: str, reason: str = "") -> None:
        """by: the hop that decided it. Raises LedgerError for a trajectory that is unknown, or elsewhere."""
        at = record.place if record is not None else ""
        if record is None or to not in MOVES.get(at, ()):
            state = f"it is {at}" if at in MOVES else "it was consumed or dropped before"
            wanted = " or ".join(place for place in MOVES if to in MOVES[place])
            help = f"let {by} {VERBS[to]} a trajectory once, and only one that is {wanted}"
            raise LedgerError(f"hop {by} can't {VERBS[to]} trajectory {key}: {state}", help)
        counts = self.counts
        if at == "in flight":
            counts.in_flight -= 1
        else:
            counts.ready -= 1
        if to == "ready":
            counts.ready += 1
        elif to == "consumed":
            counts.consumed += 1
        else:
            counts.dropped[reason] = counts.dropped.get(reason, 0) + 1
        record.place = to

    def check(self, records: Iterable[Record]) -> None:
        """Recount those that live. Raises LedgerError when the sum does not hold."""
        c = self.counts
        places = [record.place for record in records]
        total = c.in_flight + c.ready + c.consumed + sum(c.dropped.values())
        if (
            c.dispatched != total
            or places.count("in flight") != c.in_flight
            or places.count("ready") != c.ready
        ):
            raise LedgerError(
                f"dispatched {c.dispatched} is not in flight {c.in_flight} + ready {c.ready} + consumed {c.consumed} "
                f"+ dropped {sum(c.dropped.values())}",
                "this is a fault of the runtime; report it with the run directory",
            )
