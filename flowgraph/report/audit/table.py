"""The audit as a table: seams ranked by bytes a step with what lies beneath, then what every process pays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flowgraph.report.audit.lines import Line, painted, table, wrapped
from flowgraph.report.audit.rows import HOT, Audit, FieldRow, Saving, SeamRow, differs, percent
from flowgraph.spec.units import counted, per_step, percent_text, share_text, size_text

OVER = "!"  # beside a measured mean above the predicted max
OFF = "≠"  # beside one that is not the price at the run's own lengths


def render_table(audit: Audit, width: int = 100, *, fields: bool = True, color: bool = False) -> str:
    """No line is wider than `width` (at least 72). fields: also a line for each port; color: for a terminal."""
    width = max(width, 72)
    parts = [
        _titled("bytes a step", _seams(audit, width, fields, color), color),
        _titled("processes", _processes(audit, width, color), color),
        _titled("who reads whose bytes", _pairs(audit, width, color), color),
        (line for note in _notes(audit) for line in wrapped(note, width)),
    ]
    return "\n\n".join(text for part in parts if (text := "\n".join(part))) + "\n"


def _titled(title: str, lines: Iterable[str], color: bool) -> Iterator[str]:
    yield painted(title, "heading", color)
    yield ""
    yield from lines


# --- seams -----------------------------------------------------------------------------------------------------


def _seams(audit: Audit, width: int, fields: bool, color: bool) -> Iterator[str]:
    """After a run: what was measured beside the price at the run's own lengths, and how far the two are apart."""
    ran = audit.steps is not None
    head = Line("seam", ("mean", "max", "share", *(("at lengths", "measured", "diff") if ran else ())))
    rows = [line for seam in audit.seams if seam.fields for line in _seam(seam, ran, fields)]
    return table(head, rows, width, color=color)


def _seam(seam: SeamRow, ran: bool, fields: bool) -> Iterator[Line]:
    style = "red" if seam.share > HOT or seam.over else "bold"
    cells = [_price(seam, seam.mean), _price(seam, seam.max), share_text(seam.share)]
    cells += _ran(seam.expected, seam.measured, seam.difference, seam.exceeds, seam.off) if ran else []
    over = f"  over {seam.over}" if seam.over else ""
    yield Line(f"{seam.source} → {seam.reader}{over}", tuple(cells), style)
    about = [f"{seam.transport}, until {seam.lifetime}"]
    about += [f"declared means off by {percent_text(seam.declared)}"] if seam.declared is not None else []
    yield Line("; ".join(about), style="dim", indent=2)
    if seam.pushed:
        one = seam.pushed
        yield Line(one.text, (size_text(one.mean_bytes), size_text(one.max_bytes), ""), "dim", 2)
    for text in savings(seam):
        yield Line(text, style="dim", indent=2)
    for field in seam.fields if fields else ():
        cells = [_price(field, field.mean), _price(field, field.max), ""]
        if ran:
            apart = field_difference(field)
            cells += _ran(field.expected, field.measured, apart, field.exceeds, field.off)
        yield Line("; ".join(_about(seam, field)), tuple(cells), "dim", 4)


def savings(seam: SeamRow) -> Iterator[str]:
    """What each pass takes from a seam, of what is read and of what passes through the driver."""
    if seam.before is not None and (seam.before != seam.mean or any(one.read for one in seam.saved)):
        saved = _saved(seam.saved, driver=False)
        yield f"read {size_text(seam.before)} → {size_text(seam.mean)}{saved}"
    if seam.driver_before or seam.driver:
        before = seam.driver if seam.driver_before is None else seam.driver_before
        same = before == seam.driver
        change = size_text(seam.driver) if same else f"{size_text(before)} → {size_text(seam.driver)}"
        yield f"through the driver {change}{_saved(seam.saved, driver=True)}"


def _saved(saved: Iterable[Saving], *, driver: bool) -> str:
    pairs = [(one.name, one.driver if driver else one.read) for one in saved]
    texts = [
        f"{name} {'−' if value > 0 else '+'}{size_text(abs(value))}"
        for name, value in pairs
        if abs(value) > 0.5
    ]
    return f": {', '.join(texts)}" if texts else ""


def _about(seam: SeamRow, field: FieldRow) -> Iterator[str]:
    """A field's name, type and promises, then what is particular to it."""
    facts = "".join(f" {fact}" for fact in field.facts)
    by = f" from {field.producer}" if field.producer != seam.source else ""
    yield f"{field.port} {field.type}{facts}{by}"
    if field.encoding:
        yield field.encoding
    if field.copying:
        yield field.copying
    if others := [name for name in field.readers if name != seam.reader]:
        yield f"also read by {', '.join(others)}"


def field_difference(field: FieldRow) -> float | None:
    """Measured against the price at the run's own lengths, in percent, where the two differ at all."""
    return percent(field.expected, field.measured) if field.expected else None


def _ran(
    expected: float | None, measured: float | None, apart: float | None, exceeds: bool, off: bool
) -> list[str]:
    mark = (OFF if off else "") + (OVER if exceeds else "")
    return [
        "–" if expected is None else size_text(expected),
        "–" if measured is None else size_text(measured) + (f" {mark}" if mark else ""),
        "–" if apart is None else percent_text(apart),
    ]


def _price(row: SeamRow | FieldRow, nbytes: float) -> str:
    if not row.priced and not nbytes:
        return "unpriced"
    return size_text(nbytes) + ("" if row.priced else "+?")


# --- owners ----------------------------------------------------------------------------------------------------


def _processes(audit: Audit, width: int, color: bool) -> Iterator[str]:
    ran = audit.steps is not None
    head = Line("in or out of", ("mean", "max", *(("measured",) if ran else ()), "holds up to"))
    rows = []
    for one in audit.processes:
        cells = [size_text(one.mean), size_text(one.max)]
        cells += [_measured(one.measured)] if ran else []
        holds = "unpriced" if one.memory is None else size_text(one.memory)
        rows.append(Line(one.owner, (*cells, holds)))
    return table(head, rows, width, color=color)


def _pairs(audit: Audit, width: int, color: bool) -> Iterator[str]:
    ran = audit.steps is not None
    head = Line("writer → reader", ("mean", "max", *(("measured",) if ran else ())))
    rows = []
    for p in audit.owners:
        same = " (same process)" if p.writer == p.reader else ""
        cells = [size_text(p.mean), size_text(p.max), *([_measured(p.measured)] if ran else [])]
        rows.append(Line(f"{p.writer} → {p.reader}{same}", tuple(cells)))
    for name, total, before in (
        ("in or out of the driver", audit.driver, audit.driver_before),
        ("all", audit.total, audit.before),
    ):
        cells = [size_text(total.mean), size_text(total.max), *([_measured(total.measured)] if ran else [])]
        was = "" if before is None or before == total.mean else f", {size_text(before)} without any pass"
        rows.append(Line(name + was, tuple(cells), "bold"))
    rows += list(_copied(audit, ran))
    return table(head, rows, width, color=color)


def _copied(audit: Audit, ran: bool) -> Iterator[Line]:
    """What is copied on the way, and where."""
    for where in ("writer", "driver", "reader"):
        planned = getattr(audit.copies, where)
        measured = getattr(audit.copied, where) if audit.copied else None
        if planned or measured:
            who = "the driver" if where == "driver" else f"{where}s"
            yield Line(f"copied by {who}", (size_text(planned), "", *([_measured(measured)] if ran else [])))


def _measured(nbytes: float | None) -> str:
    return "–" if nbytes is None else size_text(nbytes)


# --- notes -----------------------------------------------------------------------------------------------------


def _notes(audit: Audit) -> Iterator[str]:
    yield from audit.notes
    control = [f"{s.source} → {s.reader}" for s in audit.seams if not s.fields]
    if control:
        yield f"control seams, no payload: {', '.join(control)}"
    if any(not s.priced for s in audit.seams):
        yield "unpriced: the model's tensors are unknown until it is pulled"
    if any(s.exceeds for s in audit.seams):
        yield f"{OVER} the measured mean is above the predicted max"
    if any(s.off for s in audit.seams):
        yield f"{OFF} measured is more than 1% off the price at the lengths that the run recorded"
    if audit.steps is not None:
        yield from _of_a_run(audit)


def _of_a_run(audit: Audit) -> Iterator[str]:
    if audit.control_bytes is not None:
        yield f"measured over {counted(audit.steps or 0, 'step')}; control messages {per_step(audit.control_bytes)}"
    priced = [s for s in audit.seams if s.expected is not None and s.measured is not None]
    if priced:
        expected, measured = sum(s.expected or 0 for s in priced), sum(s.measured or 0 for s in priced)
        exact = [s for s in priced if s.expected == s.measured]
        close = "no more than 1% off" if not differs(expected, measured) else "more than 1% off"
        yield (
            f"of {counted(len(priced), 'seam')}, {len(exact)} moved exactly their price at the run's own lengths; "
            f"all together are {close}"
        )
