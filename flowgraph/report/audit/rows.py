"""What an audit says: one row a field, one a seam, one a pair of owners, one an owner."""

from __future__ import annotations

import msgspec

from flowgraph.plan.copies import Copies
from flowgraph.plan.plan import Pushed


class Carried(msgspec.Struct, frozen=True):
    """What a single controller would carry of a field or of all: bytes a step, padded, in the producer's dtype.

    raw, base64: as raw bytes, and as text in a JSON reply, which is how engines that answer over HTTP send arrays
    read: those that the reader gets; controller: in and out of the controller's process
    token: of one token of one row, None for what has no tokens
    """

    read_raw: float
    read_base64: float
    controller_raw: float
    controller_base64: float
    token_raw: float | None = None
    token_base64: float | None = None


class FieldRow(msgspec.Struct, frozen=True):
    """One port's share of a seam. mean and max are bytes a step, as the reader reads them; measured likewise.

    encoding: how it lies where that is not as the hop gives it; readers: every hop that reads the column
    copies: of each byte of a value on its way, as the plan has it; None where none crosses by itself (it is handed on
    or derived); copied: as the run measured it, None also where it does not say
    before: mean without any pass; naive: as a single controller carries it
    expected: the price at the lengths that the run recorded
    exceeds: a step read more on average than the most that was predicted
    owners: of the hop that wrote it, and of the one that reads it; driver: bytes a step that pass through the driver
    ranks, slice_bytes, split: which part each rank of the reader's owner reads, as in the plan
    """

    port: str
    producer: str
    column: str
    type: str
    facts: tuple[str, ...]
    mean: float
    max: int
    priced: bool
    copies: Copies | None
    measured: float | None = None
    exceeds: bool = False
    encoding: str = ""
    readers: tuple[str, ...] = ()
    before: float | None = None
    naive: Carried | None = None
    expected: float | None = None
    owners: tuple[str, str] = ("", "")
    driver: float = 0.0
    ranks: int = 1
    slice_bytes: float = 0.0
    split: tuple[tuple[str, int], ...] = ()
    copied: Copies | None = None

    @property
    def moves(self) -> bool:
        """Whether its bytes go from one process to another."""
        return self.owners[0] != self.owners[1] and self.mean > 0

    @property
    def off(self) -> bool:
        return differs(self.expected, self.measured)

    @property
    def copying(self) -> str:
        """`2 copies (1 copy as it ran)`, nothing where none of its bytes cross."""
        if self.copies is None:
            return ""
        ran = self.copied.text if self.copied else self.copies.text
        return self.copies.text + (f" ({ran} as it ran)" if ran != self.copies.text else "")


class Saving(msgspec.Struct, frozen=True):
    """What one pass takes from a seam: mean bytes a step, negative where it adds some."""

    name: str
    read: float
    driver: float


class SeamRow(msgspec.Struct, frozen=True):
    """One seam. share: of all bytes read in a step. difference: measured against expected, in percent.

    by_reference: bytes of `mean` that another hop than `source` wrote; driver: of those that pass through the driver
    before, driver_before: mean and driver without any pass; saved: the passes that changed them
    over: the budget that this seam breaks, or of whose owner it is the largest part, as text
    pushed: what goes on from its reader into an engine's servers
    declared: measured against mean, in percent: the error of the means that the graph declares
    measured, expected and what follows from them are None before a run, and where a field was never read
    """

    source: str
    reader: str
    transport: str
    lifetime: str
    fields: tuple[FieldRow, ...]
    control: tuple[str, ...]
    mean: float
    max: int
    share: float
    by_reference: float
    priced: bool
    measured: float | None = None
    difference: float | None = None
    exceeds: bool = False
    driver: float = 0.0
    before: float | None = None
    driver_before: float | None = None
    saved: tuple[Saving, ...] = ()
    naive: Carried | None = None
    over: str = ""
    expected: float | None = None
    declared: float | None = None
    pushed: Pushed | None = None

    @property
    def passes(self) -> tuple[str, ...]:
        """Those that saved some of what is read of it or passes through the driver, the one that saved most first."""
        paid = [one for one in self.saved if one.read + one.driver > 0]
        return tuple(one.name for one in sorted(paid, key=lambda one: -(one.read + one.driver)))

    @property
    def off(self) -> bool:
        """Whether it, or a field of it, was measured to differ from the price at the run's own lengths."""
        return differs(self.expected, self.measured) or any(field.off for field in self.fields)


class PairRow(msgspec.Struct, frozen=True):
    """All bytes a step that one owner writes and another (or the same) reads."""

    writer: str
    reader: str
    mean: float
    max: int
    measured: float | None = None


class OwnerRow(msgspec.Struct, frozen=True):
    """One process: payload a step in or out of it, and what it holds at its most. memory: None while unknown."""

    owner: str
    mean: float
    max: int
    memory: int | None
    measured: float | None = None


class Total(msgspec.Struct, frozen=True):
    mean: float
    max: int
    measured: float | None = None


class Audit(msgspec.Struct, frozen=True):
    """seams: most bytes first, control seams last. driver: payload in or out of the driver's process.

    before, driver_before: mean of all seams, and through the driver, without any pass
    naive: as a single controller carries it; what trainers send to engines (weights) goes past it there too, and is
    not in it
    steps and control_bytes (message bytes a step through the driver's sockets) are known after a run only
    notes: what a reader of the numbers has to know besides, one sentence each
    copies, copied: bytes a step that are copied on all seams, as the plan has them and as they were measured
    """

    graph: str
    seams: tuple[SeamRow, ...]
    owners: tuple[PairRow, ...]
    total: Total
    driver: Total
    steps: int | None = None
    control_bytes: float | None = None
    processes: tuple[OwnerRow, ...] = ()
    before: float | None = None
    driver_before: float | None = None
    naive: Carried | None = None
    notes: tuple[str, ...] = ()
    copies: Copies = Copies(0, 0, 0)
    copied: Copies | None = None

    def __str__(self) -> str:
        """The table that `flowgraph audit` prints."""
        from flowgraph.report.audit.table import render_table

        return render_table(self)


HOT = 0.5  # of all bytes a step: a seam that carries more dominates
CLOSE = 1.0  # percent that a measured size may be off its price at the run's own lengths


def differs(expected: float | None, measured: float | None) -> bool:
    """Whether two sizes differ by more than CLOSE percent."""
    if expected is None or measured is None:
        return False
    return abs(measured - expected) > expected * CLOSE / 100


def percent(of: float | None, value: float | None) -> float | None:
    """How much larger `value` is than `of`, in percent; None where that says nothing."""
    if of is None or value is None or (not of and value):
        return None
    return (value - of) / of * 100 if of else 0.0


def to_json(audit: Audit) -> bytes:
    return msgspec.json.format(msgspec.json.encode(audit), indent=1)
