"""Text tables of a given width, for a terminal or not. A table of a thousand seams takes a few milliseconds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

GAP = 2  # blanks between columns
STYLES = {"bold": "1", "dim": "2", "red": "1;31", "heading": "2"}  # as a terminal is told


class Line(NamedTuple):
    """One row: a text that wraps, and numbers at the right. Without numbers the text takes the whole width."""

    text: str
    cells: tuple[str, ...] = ()
    style: str = ""
    indent: int = 0


def table(head: Line, rows: Sequence[Line], width: int, *, color: bool = False) -> Iterator[str]:
    """The head, a rule and the rows. Every line fits the width, as long as the numbers leave room for a text."""
    every = [head, *(row for row in rows if row.cells)]
    count = max(len(row.cells) for row in every)
    sizes = [max((len(r.cells[i]) for r in every if i < len(r.cells)), default=0) for i in range(count)]
    room = max(16, width - sum(size + GAP for size in sizes))
    yield from _row(head, sizes, room, width, color)
    yield painted("─" * width, "dim", color)
    for row in rows:
        yield from _row(row, sizes, room, width, color)


def _row(row: Line, sizes: Sequence[int], room: int, width: int, color: bool) -> Iterator[str]:
    texts = wrapped(row.text, room if row.cells else width, row.indent)
    pairs = zip(row.cells, sizes, strict=False)
    numbers = "".join(" " * GAP + cell.rjust(size) for cell, size in pairs)
    yield painted((texts[0].ljust(room) + numbers).rstrip() if row.cells else texts[0], row.style, color)
    for text in texts[1:]:
        yield painted(text, row.style, color)


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """The lines of a text, all but the first two blanks further in."""
    first = " " * indent
    if len(first) + len(text) <= width:
        return [first + text]
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=first + "  ", break_on_hyphens=False
    ) or [first]


def painted(text: str, style: str, color: bool) -> str:
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if color and style and text else text
