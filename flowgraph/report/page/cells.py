"""Tables of the page. A cell that is a number has it in `data-v`, by which it is sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flowgraph.report.draw.text import clean, escape
from flowgraph.spec.units import size_text

TITLES = {
    "read": "mean bytes a step, as the reader reads them",
    "at most": "bytes a step that are never exceeded",
    "share": "of all bytes read in a step",
    "through the driver": "mean bytes a step that pass through the driver's memory",
    "expected": "the price at the lengths that the run recorded",
    "difference": "measured against expected",
    "naive raw": "what passes through a single controller, padded, in the dtype that the hop gives",
    "naive base64": "the same as text in a JSON reply",
    "passes": "those that save some of what is read or passes through the driver, the one that saves most first",
    "in or out": "mean payload a step that enters or leaves the process",
    "memory": "what the process holds at its most",
    "busy": "of the run's time, how long at least one of its firings was under way",
}


class Cell(NamedTuple):
    """text as it is shown; value: what it is sorted by, where that is a number; html: when it is made already.

    number: whether it stands among numbers, be it unknown itself
    """

    text: str
    value: float | None = None
    html: bool = False
    number: bool = False
    code: bool = False


UNKNOWN = Cell("–", number=True)


def size(nbytes: float | None, priced: bool = True) -> Cell:
    if nbytes is None:
        return UNKNOWN
    return Cell(size_text(nbytes) + ("" if priced else " + unpriced"), nbytes)


def table(
    name: str,
    names: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    keys: Sequence[str] = (),
    below: Sequence[str] = (),
) -> str:
    """A table that can be sorted. keys: of each row, the seam that it is of; below: what opens below it, or ""."""
    body = []
    for i, row in enumerate(rows):
        key = f' data-row="{escape(keys[i])}"' if keys else ""
        body.append(f"<tr{key}>{_cells(row)}</tr>")
        if below and below[i]:
            body.append(f'<tr class="below" hidden><td colspan="{len(names)}">{below[i]}</td></tr>')
    return f'<div class="scroll">{_table(name, names, rows, "".join(body), sortable=True)}</div>'


def plain_table(name: str, names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table in the order that it has."""
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return _table(name, names, rows, body, sortable=False)


def _table(
    name: str, names: Sequence[str], rows: Sequence[Sequence[Cell]], body: str, *, sortable: bool
) -> str:
    heads = (
        _head(one, any(_number(row[i]) for row in rows), sortable=sortable) for i, one in enumerate(names)
    )
    return f'<table class="{name}"><thead><tr>{"".join(heads)}</tr></thead><tbody>{body}</tbody></table>'


def _head(name: str, number: bool, *, sortable: bool) -> str:
    css = ' class="n"' if number else ""
    title = f' title="{escape(TITLES[name])}"' if name in TITLES else ""
    if not sortable:
        return f'<th scope="col"{css}{title}>{escape(name)}</th>'
    return f'<th scope="col"{css}><button type="button"{title}>{escape(name)}</button></th>'


def _number(cell: Cell) -> bool:
    return cell.number or cell.value is not None


def _cells(row: Sequence[Cell]) -> str:
    return "".join(map(_cell, row))


def _cell(cell: Cell) -> str:
    text = cell.text if cell.html else escape(clean(cell.text))
    text = f"<code>{text}</code>" if cell.code else text
    css = ' class="n"' if _number(cell) else ""
    value = "" if cell.value is None else f' data-v="{cell.value!r}"'
    return f"<td{css}{value}>{text}</td>"
