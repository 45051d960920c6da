"""The data-flow diagram of a plan: shape, bytes, owner and lifetime on every edge."""

from __future__ import annotations

from collections.abc import Callable

from flowgraph.plan.plan import Plan
from flowgraph.report.audit.audit import audit
from flowgraph.report.audit.rows import Audit
from flowgraph.report.draw.diagram import Diagram, Format
from flowgraph.report.draw.dot import to_dot
from flowgraph.report.draw.mermaid import to_mermaid
from flowgraph.report.draw.svg import to_svg
from flowgraph.report.draw.table import to_table

WRITERS: dict[Format, Callable[[Plan, Audit], str]] = {
    "svg": to_svg,
    "mermaid": to_mermaid,
    "dot": to_dot,
    "table": to_table,
}
FORMATS = tuple(WRITERS)  # the page is made of several of these


def draw(plan: Plan, priced: Audit | None = None, *, format: Format = "svg") -> Diagram:
    """The diagram as text; the same plan and audit give the same bytes.

    priced: the audit of this plan: with stages it is drawn before → after, with a run measured beside predicted; that
    of the plan alone when None. Raises ValueError for a format that is not in FORMATS.
    """
    if format not in WRITERS:
        raise ValueError(f"no format {format!r}; there are {', '.join(WRITERS)}")
    return Diagram(WRITERS[format](plan, audit(plan) if priced is None else priced), format)


__all__ = ["FORMATS", "Diagram", "Format", "draw"]
