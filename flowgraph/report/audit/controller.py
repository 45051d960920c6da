"""`audit --naive` as a table: what a single controller carries of every field, beside what flowgraph moves."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.report.audit.lines import Line, painted, table, wrapped
from flowgraph.report.audit.rows import Audit, FieldRow, SeamRow
from flowgraph.spec.units import size_text

SHOWN = 12  # fields that still move
NOTES = (
    "raw: bytes as they lie in memory; base64: arrays as text in a JSON reply, as engines that answer over HTTP send "
    "them (four characters for every three bytes begun)",
    "every array is padded to the bounds of its dims, in the dtype that its hop gives; all is written, and passes "
    "through the controller's process on its way",
    "weights go from trainer to engine past the controller in such frameworks too, and are not counted",
)


def render_naive(audit: Audit, width: int = 100, *, color: bool = False) -> str:
    """No line is wider than `width` (at least 72). The audit is one of a graph, which knows what is carried."""
    width = max(width, 72)
    notes = [line for note in (*audit.notes, *NOTES) for line in wrapped(note, width)]
    parts = ["\n".join(_carried(audit, width, color)), "\n".join(notes)]
    if moving := list(_moving(audit)):
        title = painted("still moves once on the data plane", "heading", color)
        parts.append("\n".join([title, "", *(line for text in moving for line in wrapped(text, width, 2))]))
    return "\n\n".join(parts) + "\n"


def _carried(audit: Audit, width: int, color: bool) -> Iterator[str]:
    yield painted("as a single controller would carry it, bytes a step", "heading", color)
    yield ""
    head = Line("field", ("a token", "read", "controller", "flowgraph", "driver", "less"))
    rows = [line for seam in audit.seams for field in seam.fields for line in _field(seam, field)]
    yield from table(head, [*rows, *_total(audit)], width, color=color)


def _field(seam: SeamRow, field: FieldRow) -> Iterator[Line]:
    """Raw with what flowgraph moves beside it, then as base64 with the type."""
    one = field.naive
    if one is None:
        return
    moves = (size_text(field.mean), size_text(field.driver), times(one.read_raw, field.mean))
    raw = (_token(one.token_raw), size_text(one.read_raw), size_text(one.controller_raw), *moves)
    yield Line(f"{seam.reader}.{field.port} from {field.producer}", raw)
    text = (_token(one.token_base64), size_text(one.read_base64), size_text(one.controller_base64))
    how = "text" if field.type.startswith(("text", "json")) else "base64"
    yield Line(f"{field.type}, as {how}", text, "dim", 2)


def _total(audit: Audit) -> Iterator[Line]:
    one = audit.naive
    if one is None:
        return
    moved = sum(f.mean for s in audit.seams for f in s.fields if f.naive is not None)
    weights = sum(f.driver for s in audit.seams for f in s.fields if f.naive is None)
    driver = audit.driver.mean - weights  # which the controller's bytes have not in them either
    raw = ("", size_text(one.read_raw), size_text(one.controller_raw))
    yield Line("all", (*raw, size_text(moved), size_text(driver), times(one.read_raw, moved)), "bold")
    yield Line("as base64", ("", size_text(one.read_base64), size_text(one.controller_base64)), "dim", 2)
    less = times(one.controller_raw, driver)
    if less != "–":
        yield Line(
            f"through the driver goes {less} less than through the controller; as base64 "
            f"{times(one.controller_base64, driver)}",
            style="bold",
        )


def _moving(audit: Audit) -> Iterator[str]:
    """The largest fields that go from one worker to another, and which part each rank needs."""
    fields = [
        field for seam in audit.seams for field in seam.fields if field.moves and "driver" not in field.owners
    ]
    fields.sort(key=lambda field: -field.mean)
    for field in fields[:SHOWN]:
        form = f", {field.encoding}" if field.encoding else ""
        writer, reader = field.owners
        text = f"{field.port} {field.type}{form}: {size_text(field.mean)} once, {writer} → {reader}"
        yield text + (f"; {_slice(field)}" if field.ranks > 1 else "")
    if rest := fields[SHOWN:]:
        yield f"and {len(rest)} more of {size_text(sum(f.mean for f in rest))} together"


def _slice(field: FieldRow) -> str:
    parts = " × ".join(f"1/{count} of {axis}" for axis, count in field.split) or "all of it"
    return f"each of {field.ranks} ranks reads {parts}, {size_text(field.slice_bytes)}"


def times(before: float, after: float) -> str:
    """How many times as much: `4.0×`; `all` when nothing is left, `–` when there was nothing."""
    if not before:
        return "–"
    if not after:
        return "all"
    return f"{before / after:,.0f}×" if before >= 100 * after else f"{before / after:.1f}×"


def _token(nbytes: float | None) -> str:
    return "–" if nbytes is None else f"{round(nbytes):,} B"
