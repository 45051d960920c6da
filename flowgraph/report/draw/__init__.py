"""The data-flow diagram of a plan: shape, bytes, owner and lifetime on every edge."""

from __future__ import annotations

from flowgraph.plan.measured import Measured
from flowgraph.plan.plan import Plan
from flowgraph.report.audit.audit import audit
from flowgraph.report.draw.diagram import Diagram, Format
from flowgraph.report.draw.mermaid import to_mermaid
from flowgraph.report.draw.svg import to_svg

FORMATS: tuple[Format, ...] = ("svg", "mermaid")


def draw(plan: Plan, *, format: Format = "svg", measured: Measured | None = None) -> Diagram:
    """The diagram as text; the same plan and measurement give the same bytes.

    measured: of a run of this plan; its bytes stand beside the predicted ones. Raises ValueError for a format
    that is not in FORMATS.
    """
    priced = audit(plan, measured)
    if format == "svg":
        return Diagram(to_svg(plan, priced), format)
    if format == "mermaid":
        return Diagram(to_mermaid(plan, priced), format)
    raise ValueError(f"no format {format!r}; there are {', '.join(FORMATS)}")


__all__ = ["FORMATS", "Diagram", "Format", "draw"]
