"""A report as a table: a line a check; then what to do, in lines that can be copied."""

from __future__ import annotations

import io
from collections import Counter

from flowgraph.report.doctor.checks import Report
from flowgraph.spec.units import counted

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def render(report: Report, width: int = 100, *, color: bool = False) -> str:
    """No line of the table is wider than `width` (at least 80); a command is never broken."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out,
        width=max(width, 80),
        color_system="standard" if color else None,
        force_terminal=color,
        legacy_windows=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", ratio=3, overflow="fold")
    table.add_column("affects", ratio=2, overflow="fold")
    for check in report.checks:
        status = Text(check.status, style=STYLES[check.status])
        table.add_row(status, check.name, Text(check.found), Text(check.affects, style="dim"))
    console.print(Text(report.subject))
    console.print(table)
    if report.fixes:
        console.print(Text("to do"))
    for fix, names in report.fixes.items():
        console.print(Text(f"  {', '.join(names)}"))
        console.print(Text(f"    {fix}"), soft_wrap=True)
    console.print(Text(("\n" if report.fixes else "") + summary(report)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def summary(report: Report) -> str:
    """`8 ok, 1 warning, 1 failure`."""
    count = Counter[str](check.status for check in report.checks)
    parts = [f"{count['ok']} ok"]
    parts += [counted(count[s], noun) for s, noun in (("warn", "warning"), ("fail", "failure")) if count[s]]
    return ", ".join([*parts, *([f"{count['skip']} skipped"] if count["skip"] else [])])
