"""How a finding is shown: position, code, the line with a caret, notes, and one help line."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping

from flowgraph.errors import Diagnostic, Place


def render(diagnostics: Iterable[Diagnostic], sources: Mapping[str, str]) -> str:
    """All findings as text. `sources`: file name → its text, for the quoted lines."""
    return "\n\n".join(_one(d, sources) for d in diagnostics)


def _one(d: Diagnostic, sources: Mapping[str, str]) -> str:
    lines = [f"{d.place}: error[{d.code}] {d.message}", *_quote(d.place, sources)]
    for note in d.notes:
        lines.append(f"  note: {note.place}: {note.text}")
        lines += _quote(note.place, sources)
    lines.append(f"  help: {d.help}")
    return "\n".join(lines)


def _quote(place: Place, sources: Mapping[str, str]) -> list[str]:
    lines = sources.get(place.file, "").splitlines()
    if not 1 <= place.line <= len(lines):
        return []
    line = lines[place.line - 1]
    start = place.column - 1
    marked = line[start : start + place.width] or " "
    number = f"{place.line:>5}"
    caret = "^" * max(1, len(_blank(marked)))
    return [f"{number} | {line}".rstrip(), f"{' ' * len(number)} | {_blank(line[:start])}{caret}"]


def _blank(text: str) -> str:
    """Space as wide as the text is on a terminal: wide characters take two cells, combining ones none."""
    return "".join(
        c
        if c == "\t"
        else ""
        if unicodedata.combining(c)
        else "  "
        if unicodedata.east_asian_width(c) in "WF"
        else " "
        for c in text
    )
