"""The tables of the page. A cell that is a number has it in `data-v`, by which it is sorted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flowgraph.report.audit import FieldRow, SeamRow
from flowgraph.report.census import Census
from flowgraph.report.census.census import BOUNDARIES
from flowgraph.report.draw.text import clean, escape
from flowgraph.report.page.views import View
from flowgraph.spec.units import percent_text, share_text, size_text


class Cell(NamedTuple):
    """text as it is shown; value: what it is sorted by, where that is a number; html: when it is made already."""

    text: str
    value: float | None = None
    html: bool = False


def seam_table(view: View) -> str:
    ran = view.bytes_as == "measured"
    names = ["seam", "read", "at most", "share", "through the driver"]
    names += ["at its lengths", "measured", "off"] if ran else []
    names += ["raw", "base64"] if any(s.naive for s in view.seams) else []
    names += ["crosses by", "until", "saved by"]
    rows = [_seam(view, seam, names, ran) for seam in view.seams]
    return table("seams", names, rows, [f"{s.source}→{s.reader}" for s in view.seams])


def _seam(view: View, seam: SeamRow, names: Sequence[str], ran: bool) -> list[Cell]:
    cells = [
        Cell(_name(seam), None, html=True),
        _size(seam.mean, seam.priced),
        _size(seam.max, seam.priced),
        Cell(share_text(seam.share), seam.share),
        _size(seam.driver),
    ]
    if ran:
        off = Cell("–") if seam.difference is None else Cell(percent_text(seam.difference), seam.difference)
        cells += [_size(seam.expected), _size(seam.measured), off]
    if "raw" in names:
        raw = seam.naive
        cells += [_size(raw.controller_raw if raw else None), _size(raw.controller_base64 if raw else None)]
    return [*cells, Cell(seam.transport), Cell(seam.lifetime), Cell(", ".join(seam.passes))]


def _name(seam: SeamRow) -> str:
    """The seam, which opens to its fields."""
    name = f"{escape(clean(seam.source))} → {escape(clean(seam.reader))}"
    over = f' <b class="over">over {escape(seam.over)}</b>' if seam.over else ""
    if not seam.fields:
        return f"{name}{over}<small>{escape(clean(', '.join(seam.control)))}</small>"
    fields = "".join(
        f"<li>{escape(clean(text))}</li>" for field in seam.fields for text in _field(seam, field)
    )
    return f"<details><summary>{name}{over}</summary><ul>{fields}</ul></details>"


def _field(seam: SeamRow, field: FieldRow) -> Iterator[str]:
    facts = "".join(f" {fact}" for fact in field.facts)
    origin = f" from {field.producer}" if field.producer != seam.source else ""
    readers = [name for name in field.readers if name != seam.reader]
    parts = [
        f"{field.port} {field.type}{facts}{origin}",
        f"{size_text(field.mean)} a step" if field.priced else "unpriced",
        field.encoding,
        f"{field.copies} {'copy' if field.copies == 1 else 'copies'}",
        f"also read by {', '.join(readers)}" if readers else "",
        f"measured {size_text(field.measured)}" if field.measured is not None else "",
    ]
    if field.split:
        slices = " × ".join(f"1/{n} of {axis}" for axis, n in field.split)
        parts.append(f"each of {field.ranks:,} ranks reads {slices}, {size_text(field.slice_bytes)}")
    yield "; ".join(part for part in parts if part)


def _size(nbytes: float | None, priced: bool = True) -> Cell:
    if nbytes is None:
        return Cell("–")
    return Cell(size_text(nbytes) + ("" if priced else " + unpriced"), nbytes)


def census_table(found: Census) -> str:
    names = ["state", "owner", "bytes", *BOUNDARIES, "restored by"]
    rows = []
    for state in found.states:
        name = f"{state.name} ({', '.join(state.parts)})" if state.parts else state.name
        marks = [Cell("●" if b in state.crosses else "", float(b in state.crosses)) for b in BOUNDARIES]
        size = Cell(size_text(state.nbytes) + ("" if state.exact else " and more"), float(state.nbytes))
        rows.append([Cell(name), Cell(state.owner), size, *marks, Cell(state.restored)])
    return table("census", names, rows)


def table(name: str, names: Sequence[str], rows: Sequence[Sequence[Cell]], keys: Sequence[str] = ()) -> str:
    """keys: of each row, the seam that it is of."""
    head = "".join(f'<th scope="col"><button type="button">{escape(one)}</button></th>' for one in names)
    body = []
    for i, row in enumerate(rows):
        key = f' data-row="{escape(keys[i])}"' if keys else ""
        body.append(f"<tr{key}>{''.join(_cell(cell) for cell in row)}</tr>")
    return (
        f'<div class="scroll"><table class="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    text = cell.text if cell.html else escape(clean(cell.text))
    return f"<td>{text}</td>" if cell.value is None else f'<td class="n" data-v="{cell.value!r}">{text}</td>'
