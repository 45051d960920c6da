"""audit: what every seam costs, ranked: predicted from the plan and, after a run, measured beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flowgraph.plan.bill import memory, traffic
from flowgraph.plan.budgets import exceeded
from flowgraph.plan.copies import Copies, copied, copies
from flowgraph.plan.measured import Measured
from flowgraph.plan.plan import Plan, Read, Seam, SeamField
from flowgraph.plan.predict import predict
from flowgraph.plan.text import form_text
from flowgraph.report.audit import carried
from flowgraph.report.audit.rows import (
    Audit,
    Carried,
    FieldRow,
    OwnerRow,
    PairRow,
    SeamRow,
    Total,
    percent,
)
from flowgraph.report.audit.saved import costs, savings


class _Basis(msgspec.Struct):
    """What rows are made from.

    source: (reader, port) → mean bytes without any pass; expected: `reader.port` → bytes over the whole run
    readers: (hop, column) → the hops that read it; reads: (reader, port) → how; over: seam → the budget it breaks
    """

    plan: Plan
    measured: Measured | None
    source: Mapping[carried.Key, float]
    naive: Mapping[carried.Key, Carried]
    expected: Mapping[str, int]
    readers: Mapping[tuple[str, str], tuple[str, ...]]
    reads: Mapping[tuple[str, str], Read]
    over: Mapping[str, str]


def audit(
    plan: Plan,
    measured: Measured | None = None,
    *,
    stages: Sequence[tuple[str, Plan]] = (),
    naive: Plan | None = None,
    notes: Sequence[str] = (),
) -> Audit:
    """Price every seam of a plan. A run that finished no step measured nothing.

    stages: the plan without any pass, then after each, as `plan.compile.plans` gives them: for before → after
    naive: the plan of `plan.naive`, for what a single controller would carry; notes: to be said of it all
    """
    if measured is not None and measured.steps < 1:
        measured = None
    at = _basis(plan, measured, stages, naive)
    whole = sum(seam.mean_bytes for seam in plan.seams)
    saved, before = savings(stages), costs(stages[0][1]) if stages else {}
    rows = []
    for seam in plan.seams:
        row = _seam(at, seam, whole)
        ends = seam.source, seam.reader
        if ends in before:
            row = msgspec.structs.replace(
                row, before=before[ends][0], driver_before=before[ends][1], saved=saved.get(ends, ())
            )
        rows.append(row)
    ranked = sorted(rows, key=lambda r: (not r.fields, -r.mean, -r.max, r.source, r.reader))
    owners = _owners(rows)
    through = traffic(plan, "driver")
    return Audit(
        graph=plan.graph,
        seams=tuple(ranked),
        owners=owners,
        total=_sum(owners),
        driver=Total(through.mean, through.max, _crossing(owners, "driver", measured)),
        steps=measured.steps if measured else None,
        control_bytes=measured.control_bytes / measured.steps if measured else None,
        processes=tuple(_process(plan, name, owners, measured) for name in plan.owners),
        before=sum(n for n, _ in before.values()) if stages else None,
        driver_before=sum(n for _, n in before.values()) if stages else None,
        naive=carried.total(naive, dict(at.naive)) if naive else None,
        notes=(*notes, *_notes(measured)),
        copies=copied(plan),
        copied=_copied_of_all(measured),
    )


def _notes(measured: Measured | None) -> list[str]:
    if measured is None or measured.lengths:
        return []
    return ["the run recorded no lengths, so what it measured stands beside the declared means alone"]


def _basis(
    plan: Plan, measured: Measured | None, stages: Sequence[tuple[str, Plan]], naive: Plan | None
) -> _Basis:
    readers: dict[tuple[str, str], tuple[str, ...]] = {}
    for hop in plan.hops.values():
        for key in dict.fromkeys((r.producer, r.column) for r in hop.reads):
            readers[key] = (*readers.get(key, ()), hop.name)
    return _Basis(
        plan=plan,
        measured=measured,
        source={(s.reader, f.port): f.mean_bytes for s in stages[0][1].seams for f in s.fields}
        if stages
        else {},
        naive=carried.carried(naive) if naive else {},
        expected=predict(plan, measured.lengths) if measured and measured.lengths else {},
        readers=readers,
        reads={(h.name, r.port): r for h in plan.hops.values() for r in h.reads},
        over=_over(plan),
    )


def _over(plan: Plan) -> dict[str, str]:
    """Seam → the budgets that it breaks, or is the largest part of."""
    found: dict[str, list[str]] = {}
    for one in exceeded(plan.budgets, plan):
        assert one.budget.amount is not None
        found.setdefault(one.part, []).append(f"{one.budget.name} {one.budget.amount.text}")
    return {part: ", ".join(names) for part, names in found.items()}


def _seam(at: _Basis, seam: Seam, whole: float) -> SeamRow:
    fields = tuple(_field(at, seam, field) for field in seam.fields)
    read = _add(f.measured for f in fields) if fields else None
    expected = _add(f.expected for f in fields) if fields else None
    priced = all(f.priced for f in fields)
    parts = [f.naive for f in fields if f.naive is not None]
    return SeamRow(
        source=seam.source,
        reader=seam.reader,
        transport=seam.transport,
        lifetime=seam.lifetime,
        fields=fields,
        control=seam.control,
        mean=seam.mean_bytes,
        max=seam.max_bytes,
        share=seam.mean_bytes / whole if whole else 0.0,
        by_reference=sum(f.mean for f in fields if f.producer != seam.source),
        priced=priced,
        measured=read,
        difference=percent(expected, read) if priced else None,
        exceeds=any(f.exceeds for f in fields),
        driver=sum(f.driver[0] for f in seam.fields),
        naive=carried.add(parts) if parts else None,
        over=at.over.get(f"{seam.source} → {seam.reader}", ""),
        expected=expected,
        declared=percent(seam.mean_bytes, read) if priced else None,
        pushed=seam.pushed,
    )


def _field(at: _Basis, seam: Seam, field: SeamField) -> FieldRow:
    read = expected = None
    if at.measured is not None:
        name = f"{seam.reader}.{field.port}"
        total = at.measured.read.get(name)
        read = None if total is None else total / at.measured.steps
        priced = at.expected.get(name) if field.priced else None
        expected = None if priced is None or read is None else priced / at.measured.steps
    one = at.reads[seam.reader, field.port]
    return FieldRow(
        port=field.port,
        producer=field.producer,
        column=field.column,
        type=field.type,
        facts=field.facts,
        mean=field.mean_bytes,
        max=field.max_bytes,
        priced=field.priced,
        copies=copies(at.plan, at.plan.hops[seam.reader], one),
        measured=read,
        exceeds=field.priced and read is not None and read > field.max_bytes,
        encoding=_encoding(at.plan, one),
        readers=at.readers[field.producer, field.column],
        before=at.source.get((seam.reader, field.port)),
        naive=at.naive.get((seam.reader, field.port)),
        expected=expected,
        owners=(at.plan.hops[field.producer].owner, at.plan.hops[seam.reader].owner),
        driver=field.driver[0],
        ranks=field.ranks,
        slice_bytes=field.slice_bytes,
        split=field.split,
        copied=_copied(at, seam.reader, one),
    )


def _copied(at: _Basis, reader: str, one: Read) -> Copies | None:
    """How often each byte of a field was copied, over the whole run."""
    ran = at.measured
    column, port = f"{one.producer}.{one.column}", f"{reader}.{one.port}"
    if (
        not one.crosses
        or ran is None
        or ran.copied is None
        or not (ran.wrote.get(column) and ran.read.get(port))
    ):
        return None
    wrote = ran.wrote[column]
    return Copies(
        ran.copied.writer.get(column, 0) / wrote,
        ran.copied.driver.get(column, 0) / wrote,
        ran.copied.reader.get(port, 0) / ran.read[port],
    )


def _copied_of_all(measured: Measured | None) -> Copies | None:
    """Bytes a step."""
    if measured is None or measured.copied is None:
        return None
    found = measured.copied
    writer, driver, reader = (sum(one.values()) for one in (found.writer, found.driver, found.reader))
    return Copies(writer / measured.steps, driver / measured.steps, reader / measured.steps)


def _encoding(plan: Plan, one: Read) -> str:
    if one.handed:
        return "handed on"
    if one.derive:
        return f"derived of {', '.join(need.column for need in one.needs)}"
    how = form_text(plan.hops[one.producer].column(one.column))
    once = "once a group" if one.once else ""
    return ", ".join(word for word in (how, once) if word)


def _process(plan: Plan, owner: str, pairs: Sequence[PairRow], measured: Measured | None) -> OwnerRow:
    moves, holds = traffic(plan, owner), memory(plan, owner)
    read = _crossing(pairs, owner, measured)
    return OwnerRow(owner, moves.mean, moves.max, holds.max if holds.priced else None, read)


def _crossing(pairs: Sequence[PairRow], owner: str, measured: Measured | None) -> float | None:
    """What was measured in or out of an owner's process; the driver counts what only passes through it too."""
    if owner == "driver" and measured is not None and measured.driver_bytes:
        return measured.driver_bytes / measured.steps
    return _sum([p for p in pairs if (p.writer == owner) != (p.reader == owner)]).measured


def _owners(rows: list[SeamRow]) -> tuple[PairRow, ...]:
    pairs: dict[tuple[str, str], list[FieldRow]] = {}
    for row in rows:
        for field in row.fields:
            pairs.setdefault(field.owners, []).append(field)
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
