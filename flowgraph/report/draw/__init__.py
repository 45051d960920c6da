"""The data-flow diagram of a plan: shape, bytes, owner and lifetime on every edge."""

from __future__ import annotations

from flowgraph.plan.plan import Plan
from flowgraph.report.audit.audit import audit
from flowgraph.report.audit.rows import Audit
from flowgraph.report.draw.diagram import Diagram, Format
from flowgraph.report.draw.mermaid import to_mermaid
from flowgraph.report.draw.svg import to_svg

FORMATS: tuple[Format, ...] = ("svg", "mermaid")


def draw(plan: Plan, priced: Audit | None = None, *, format: Format = "svg") -> Diagram:
    """The diagram as text; the same plan and audit give the same bytes.

    priced: the audit of this plan: with stages it is drawn before → after, with a run measured beside predicted; that
    of the plan alone when None. Raises ValueError for a format that is not in FORMATS.
    """
    priced = audit(plan) if priced is None else priced
    if format == "svg":
        return Diagram(to_svg(plan, priced), format)
    if format == "mermaid":
        return Diagram(to_mermaid(plan, priced), format)
    raise ValueError(f"no format {format!r}; there are {', '.join(FORMATS)}")


__all__ = ["FORMATS", "Diagram", "Format", "draw"]
