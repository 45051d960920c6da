"""audit: what every seam costs, ranked: predicted from the plan and, after a run, measured beside it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flowgraph.plan.bill import traffic
from flowgraph.plan.measured import Measured
from flowgraph.plan.plan import Plan, Seam, SeamField


class FieldRow(msgspec.Struct, frozen=True):
    """One port's share of a seam. mean and max are bytes a step, as the reader reads them; measured likewise.

    copies: of one value: into the writer's block, and once more where the reader joins rows or decodes
    exceeds: a step read more on average than the most that was predicted
    """

    port: str
    producer: str
    column: str
    type: str
    facts: tuple[str, ...]
    mean: float
    max: int
    priced: bool
    copies: int
    measured: float | None = None
    exceeds: bool = False


class SeamRow(msgspec.Struct, frozen=True):
    """One seam. share: of all bytes read in a step. difference: measured against mean, in percent.

    by_reference: bytes of `mean` that another hop than `source` wrote
    measured and difference are None before a run, and where a field was never read
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


class PairRow(msgspec.Struct, frozen=True):
    """All bytes a step that one owner writes and another (or the same) reads."""

    writer: str
    reader: str
    mean: float
    max: int
    measured: float | None = None


class Total(msgspec.Struct, frozen=True):
    mean: float
    max: int
    measured: float | None = None


class Audit(msgspec.Struct, frozen=True):
    """seams: most bytes first, control seams last. driver: payload in or out of the driver's process.

    steps and control_bytes (message bytes a step through the driver's sockets) are known after a run only
    """

    graph: str
    seams: tuple[SeamRow, ...]
    owners: tuple[PairRow, ...]
    total: Total
    driver: Total
    steps: int | None = None
    control_bytes: float | None = None

    def __str__(self) -> str:
        """The table that `flowgraph audit` prints."""
        from flowgraph.report.audit.table import render_table

        return render_table(self)


def audit(plan: Plan, measured: Measured | None = None) -> Audit:
    """Price every seam of a plan. A run that finished no step measured nothing."""
    if measured is not None and measured.steps < 1:
        measured = None
    whole = sum(seam.mean_bytes for seam in plan.seams)
    rows = [_seam(plan, seam, whole, measured) for seam in plan.seams]
    ranked = sorted(rows, key=lambda r: (not r.fields, -r.mean, -r.max, r.source, r.reader))
    owners = _owners(plan, rows)
    driver = traffic(plan, "driver")
    read = _sum([p for p in owners if (p.writer == "driver") != (p.reader == "driver")]).measured
    return Audit(
        plan.graph, tuple(ranked), owners, _sum(owners), Total(driver.mean, driver.max, read),
        measured.steps if measured else None, measured.control_bytes / measured.steps if measured else None,
    )  # fmt: skip


def _seam(plan: Plan, seam: Seam, whole: float, measured: Measured | None) -> SeamRow:
    fields = tuple(_field(plan, seam, field, measured) for field in seam.fields)
    read = _add(f.measured for f in fields) if fields else None
    priced = all(f.priced for f in fields)
    difference = None
    if read is not None and priced and seam.mean_bytes:
        difference = (read - seam.mean_bytes) / seam.mean_bytes * 100
    return SeamRow(
        seam.source, seam.reader, seam.transport, seam.lifetime, fields, seam.control,
        seam.mean_bytes, seam.max_bytes,
        seam.mean_bytes / whole if whole else 0.0,
        sum(f.mean for f in fields if f.producer != seam.source),
        priced, read, difference, any(f.exceeds for f in fields),
    )  # fmt: skip


def _field(plan: Plan, seam: Seam, field: SeamField, measured: Measured | None) -> FieldRow:
    read = None
    if measured is not None:
        total = measured.read.get(f"{seam.reader}.{field.port}")
        read = None if total is None else total / measured.steps
    return FieldRow(
        field.port, field.producer, field.column, field.type, field.facts,
        field.mean_bytes, field.max_bytes, field.priced, _copies(plan, seam.reader, field),
        read, field.priced and read is not None and read > field.max_bytes,
    )  # fmt: skip


def _copies(plan: Plan, reader: str, field: SeamField) -> int:
    """One into the writer's block; an array or tensors of one row are read in place, the rest is rebuilt."""
    kind = plan.hops[field.producer].column(field.column).kind
    gather = next(r.gather for r in plan.hops[reader].reads if r.port == field.port)
    return 1 if gather == "same" and kind in ("array", "tensors") else 2


def _owners(plan: Plan, rows: list[SeamRow]) -> tuple[PairRow, ...]:
    pairs: dict[tuple[str, str], list[FieldRow]] = {}
    for row in rows:
        for field in row.fields:
            pair = plan.hops[field.producer].owner, plan.hops[row.reader].owner
            pairs.setdefault(pair, []).append(field)
    out = [
        PairRow(
            w, r, sum(f.mean for f in fields), sum(f.max for f in fields), _add(f.measured for f in fields)
        )
        for (w, r), fields in pairs.items()
    ]
    return tuple(sorted(out, key=lambda p: (-p.mean, p.writer, p.reader)))


def _sum(pairs: list[PairRow] | tuple[PairRow, ...]) -> Total:
    return Total(
        sum(p.mean for p in pairs),
        sum(p.max for p in pairs),
        _add(p.measured for p in pairs) if pairs else None,
    )


def _add(values: Iterable[float | None]) -> float | None:
    """The sum, or None when one of them is unknown: a part must not pass for the whole."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def to_json(audit: Audit) -> bytes:
    return msgspec.json.format(msgspec.json.encode(audit), indent=1)
