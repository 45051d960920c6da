"""The census as a table: a line a state, a mark a boundary that it crosses, and the sum."""

from __future__ import annotations

import io

from flowgraph.report.census.census import BOUNDARIES, Census, State
from flowgraph.spec.units import size_text

MARK = "●"


def render_table(found: Census, width: int = 100) -> str:
    """Plain text, no colour, no line wider than `width` (at least 80)."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = max(width, 80)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
    table.add_column("state", ratio=3, overflow="fold")
    table.add_column("owner", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for boundary in BOUNDARIES:
        table.add_column(
            boundary if width >= 110 or len(boundary) < 6 else f"{boundary[:4]}.",
            justify="center",
            no_wrap=True,
        )
    table.add_column("restored by", ratio=2, overflow="fold")
    for state in found.states:
        marks = [MARK if boundary in state.crosses else "" for boundary in BOUNDARIES]
        table.add_row(
            Text(_name(state)), state.owner, _size(state.nbytes, state.exact), *marks, state.restored
        )
    console.print(table)
    for line in _notes(found):
        console.print(Text(line))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _name(state: State) -> str:
    return f"{state.name} ({', '.join(state.parts)})" if state.parts else state.name


def _size(nbytes: int, exact: bool) -> str:
    return size_text(nbytes) + ("" if exact else "+?")


def _notes(found: Census) -> list[str]:
    crossed = {b: sum(b in s.crosses for s in found.states) for b in BOUNDARIES}
    parts = ", ".join(f"{b} {n}" for b, n in crossed.items())
    return [
        f"{len(found.states)} states, {_size(found.nbytes, found.exact)}; complexity {found.complexity} = {parts}",
        "concurrency: firings side by side touch it; process: it is read in another than its owner's;",
        "crash: it is lost with its owner's process, and needed to go on; run: it outlives the run.",
        "Today the death of the driver or of any worker ends the run.",
    ]
