"""The fields of a seam, as a table of their own in a row below it."""

from __future__ import annotations

from collections.abc import Callable

from flowgraph.plan.copies import Copies
from flowgraph.report.audit import FieldRow, SeamRow
from flowgraph.report.page.cells import UNKNOWN, Cell, plain_table, size

Column = tuple[str, Callable[[FieldRow], Cell]]


def field_table(seam: SeamRow) -> str:
    """A line a field; columns that would be empty are left out."""
    columns = [(name, [cell(field) for field in seam.fields]) for name, cell in _columns(seam)]
    shown = [(name, cells) for name, cells in columns if any(cell.text not in ("", "–") for cell in cells)]
    rows = [[cells[i] for _, cells in shown] for i in range(len(seam.fields))]
    return plain_table("fields", [name for name, _ in shown], rows)


def _columns(seam: SeamRow) -> list[Column]:
    return [
        ("field", lambda f: Cell(f.port)),
        ("type", lambda f: Cell(" ".join([f.type, *f.facts]), code=True)),
        ("from", lambda f: Cell("" if f.producer == seam.source else f.producer)),
        ("read", lambda f: size(f.mean, f.priced)),
        ("at most", lambda f: size(f.max, f.priced)),
        ("through the driver", lambda f: size(f.driver)),
        ("expected", lambda f: size(f.expected)),
        ("measured", lambda f: size(f.measured)),
        ("naive raw", lambda f: size(f.naive and f.naive.controller_raw)),
        ("naive base64", lambda f: size(f.naive and f.naive.controller_base64)),
        ("encoding", lambda f: Cell(f.encoding)),
        ("copies", lambda f: _copies(f.copies)),
        ("as it ran", lambda f: _copies(f.copied)),
        ("also read by", lambda f: Cell(", ".join(name for name in f.readers if name != seam.reader))),
        ("each rank reads", lambda f: Cell(_slice(f))),
    ]


def _copies(copies: Copies | None) -> Cell:
    return UNKNOWN if copies is None else Cell(copies.text, copies.total)


def _slice(field: FieldRow) -> str:
    if field.ranks <= 1:
        return ""
    parts = " × ".join(f"1/{n} of {axis}" for axis, n in field.split) or "all of it"
    return f"{parts}, each of {field.ranks:,}"
