"""FG502 of a run: what it measured a step is within every budget of the graph. What is held at once is not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowgraph.errors import Diagnostic
from flowgraph.report.audit.rows import Audit
from flowgraph.spec.budgets import BudgetDecl
from flowgraph.spec.units import counted, enough, size_text


def measured_over(audit: Audit, budgets: Sequence[BudgetDecl]) -> Iterator[Diagnostic]:
    """One finding for every budget of a step that the run's mean exceeds."""
    for budget in budgets:
        amount = budget.amount
        moved = measured_of(audit, budget) if amount is not None and amount.per_step else None
        if amount is None or moved is None or moved <= amount.nbytes:
            continue
        over = size_text(moved - amount.nbytes)
        message = (
            f"{budget.name} moved {size_text(moved)} a step, measured over {counted(audit.steps or 0, 'step')}, "
            f"{over} over its budget of {amount.text}"
        )
        help = f"declare the means of dims: as the run had them, or raise the budget to {enough(moved)}/step"
        yield Diagnostic("FG502", budget.place, message, help)


def measured_of(audit: Audit, budget: BudgetDecl) -> float | None:
    """Mean bytes a step of an owner, a seam or a transport; None where a part of it was not measured."""
    for owner in audit.processes:
        if owner.owner == budget.name:
            return owner.measured
    ends = budget.seam
    seams = [s for s in audit.seams if s.fields]
    parts = [s.measured for s in seams if s.transport == budget.name or (s.source, s.reader) == ends]
    return None if None in parts else sum(p for p in parts if p is not None)
