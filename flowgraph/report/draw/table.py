"""The diagram as plain lines, one a seam, for logs and CI: what the picture says where there is no picture."""

from __future__ import annotations

from flowgraph.plan.plan import Plan
from flowgraph.report.audit.rows import Audit
from flowgraph.report.draw.labels import EdgeText, dims_text, edge_text, held_by, totals_text
from flowgraph.report.draw.text import clean

NAMES = ("seam", "shape", "bytes", "crosses by, until", "saved by")


def to_table(plan: Plan, audit: Audit) -> str:
    """Aligned columns, in the order of the plan; a seam over half of all bytes or over a budget has a `!`."""
    rows = {(r.source, r.reader): r for r in audit.seams}
    texts = [edge_text(plan, seam, rows[seam.source, seam.reader]) for seam in plan.seams]
    ran = any(text.measured for text in texts)
    cells = [tuple(f"{name} (measured)" if ran and name == "bytes" else name for name in NAMES)]
    cells += [_cells(s.source, s.reader, t) for s, t in zip(plan.seams, texts, strict=True)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(NAMES))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    owners: dict[str, list[str]] = {}
    for hop in plan.hops.values():
        owners.setdefault(hop.owner, []).append(clean(hop.name))
    held = [f"{name} ({held_by(plan, name)}): {', '.join(names)}" for name, names in owners.items()]
    ends = [*held, totals_text(audit), clean(dims_text(plan.dims))]
    return (
        "\n".join([clean(plan.graph + (f": {plan.doc}" if plan.doc else "")), "", *lines, "", *ends]) + "\n"
    )


def _cells(source: str, reader: str, text: EdgeText) -> tuple[str, ...]:
    hot = " !" if text.hot else ""
    price = f"{text.before} → {text.price}" if text.before else text.price
    price += f" ({text.measured})" if text.measured else ""
    end = f"over {text.over}" if text.over else text.by.removeprefix("by ")
    return tuple(
        clean(cell)
        for cell in (
            f"{source} → {reader}{hot}", f"{text.shape} {text.more}", price, f"{text.how}, {text.until}", end,
        )
    )  # fmt: skip
