"""The audit as a table: for a terminal by rich, or as plain text of a given width."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from flowgraph.report.audit.rows import Audit, FieldRow, SeamRow, Total
from flowgraph.spec.units import counted, per_step, percent_text, share_text, size_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

OVER = "!"  # beside a measured mean above the predicted max
HOT = 0.5  # a seam that alone carries more than half of all bytes


def render_table(audit: Audit, width: int = 100, *, fields: bool = True) -> str:
    """Plain text, no colour, no line wider than `width` (at least 72)."""
    from rich.console import Console

    width = max(width, 72)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(renderable(audit, width, fields=fields))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def renderable(audit: Audit, width: int, *, fields: bool = True) -> RenderableType:
    """What a rich console of that width prints. fields: also a line for each port."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_seams(audit, width, fields), Text(), _owners(audit), Text()]
    parts += [Text(line) for line in _notes(audit)]
    return Group(*parts)


def _seams(audit: Audit, width: int, fields: bool) -> Table:
    """On a narrow terminal, how a seam crosses stands under its name instead of in a column of its own."""
    ran = audit.steps is not None
    narrow = width < (108 if ran else 88)
    table = _table("bytes a step")
    table.add_column("seam", ratio=1, overflow="fold")
    for name in ("mean", "max", "share", *(("measured", "diff") if ran else ())):
        table.add_column(name, justify="right", no_wrap=True)
    if not narrow:
        table.add_column("crosses by, until", overflow="fold", max_width=24)
    for seam in (s for s in audit.seams if s.fields):
        _seam_rows(table, seam, ran, narrow, fields)
    return table


def _seam_rows(table: Table, seam: SeamRow, ran: bool, narrow: bool, fields: bool) -> None:
    from rich.text import Text

    style = "bold red" if seam.share > HOT else "bold"
    crosses = f"{seam.transport}, {seam.lifetime}"
    cells = [_price(seam, seam.mean), _price(seam, seam.max), share_text(seam.share)]
    over = seam.exceeds and (not fields or (seam.measured is not None and seam.measured > seam.max))
    cells += [_measured(seam.measured, over), _difference(seam)] if ran else []
    name = Text(f"{seam.source} → {seam.reader}", style)
    if narrow:
        name.append(f"\n  {crosses}", "not bold dim")
    table.add_row(name, *(Text(c, style) for c in cells), *([] if narrow else [Text(crosses)]))
    for field in seam.fields if fields else ():
        cells = [_price(field, field.mean), _price(field, field.max), ""]
        cells += [_measured(field.measured, field.exceeds), ""] if ran else []
        cells += [] if narrow else [f"from {field.producer}" if field.producer != seam.source else ""]
        facts = "".join(f" {fact}" for fact in field.facts)
        table.add_row(Text(f"  {field.port} {field.type}{facts}", "dim"), *(Text(c, "dim") for c in cells))


def _owners(audit: Audit) -> Table:
    from rich.text import Text

    table = _table("who reads whose bytes")
    table.add_column("writer → reader", ratio=1, overflow="fold")
    for name in ("mean", "max", *(("measured",) if audit.steps is not None else ())):
        table.add_column(name, justify="right", no_wrap=True)
    rows: list[tuple[str, Total, str]] = []
    for p in audit.owners:
        same = " (same process)" if p.writer == p.reader else ""
        rows.append((f"{p.writer} → {p.reader}{same}", Total(p.mean, p.max, p.measured), ""))
    rows += [("in or out of the driver", audit.driver, "bold"), ("all", audit.total, "bold")]
    for name, total, style in rows:
        cells = [size_text(total.mean), size_text(total.max)]
        cells += [_measured(total.measured, False)] if audit.steps is not None else []
        table.add_row(Text(name, style), *(Text(c, style) for c in cells))
    return table


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    head = box.SIMPLE_HEAD
    return Table(title=title, title_justify="left", title_style="dim", box=head, expand=True, pad_edge=False)


def _price(row: SeamRow | FieldRow, nbytes: float) -> str:
    if not row.priced and not nbytes:
        return "unpriced"
    return size_text(nbytes) + ("" if row.priced else "+?")


def _measured(nbytes: float | None, exceeds: bool) -> str:
    return "–" if nbytes is None else size_text(nbytes) + (f" {OVER}" if exceeds else "")


def _difference(seam: SeamRow) -> str:
    return "–" if seam.difference is None else percent_text(seam.difference)


def _notes(audit: Audit) -> list[str]:
    lines = []
    control = [f"{s.source} → {s.reader}" for s in audit.seams if not s.fields]
    if control:
        lines.append(f"control seams, no payload: {', '.join(control)}")
    if any(not s.priced for s in audit.seams):
        lines.append("unpriced: the model's tensors are unknown until it is pulled")
    if any(s.exceeds for s in audit.seams):
        lines.append(f"{OVER} the measured mean is above the predicted max")
    if audit.steps is not None and audit.control_bytes is not None:
        lines.append(
            f"measured over {counted(audit.steps, 'step')}; control messages {per_step(audit.control_bytes)}"
        )
    return lines
