"""FG502: what the compiled plan costs is within every budget of the graph file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph
from flowgraph.passes.rewrite import PASSES
from flowgraph.plan.bill import PASSING, Bill, Cost, bill
from flowgraph.plan.plan import Plan
from flowgraph.plan.remedy import floor, remedy
from flowgraph.spec.budgets import ARENAS, BudgetDecl
from flowgraph.spec.units import enough, size_text

SHOWN = 3  # parts of a sum that is too large


class Excess(NamedTuple):
    """A budget that a plan breaks: what it is spent on, and how much that is. part: the name of the largest."""

    budget: BudgetDecl
    cost: Cost
    spent: float

    @property
    def part(self) -> str:
        return " → ".join(self.budget.seam) if self.budget.seam else self.cost.parts[0][0]


def exceeded(budgets: Sequence[BudgetDecl], plan: Plan) -> Iterator[Excess]:
    """Traffic is compared by its mean a step, memory by its bound. Every name is known to be there."""
    costs = bill(plan) if budgets else None
    for budget in budgets:
        assert costs is not None
        assert budget.amount is not None
        cost = cost_of(costs, budget)
        spent = (cost.mean if budget.amount.per_step else cost.max) if cost else 0
        if cost is not None and spent > budget.amount.nbytes:
            yield Excess(budget, cost, spent)


def check_budgets(budgets: Sequence[BudgetDecl], plan: Plan, graph: Graph) -> Iterator[Diagnostic]:
    """FG502 for every budget that is exceeded. graph: what the plan was made of, for what would bring it under."""
    return (_exceeded(plan, graph, one) for one in exceeded(budgets, plan))


def spent(budget: BudgetDecl, plan: Plan) -> float:
    """What the plan costs of what the budget is of."""
    assert budget.amount is not None
    cost = cost_of(bill(plan), budget)
    return (cost.mean if budget.amount.per_step else cost.max) if cost else 0


def cost_of(costs: Bill, budget: BudgetDecl) -> Cost | None:
    """What the budget is of. None: an owner that no hop has, or a transport that no seam crosses by."""
    assert budget.amount is not None
    owners = costs.traffic if budget.amount.per_step else costs.memory
    if budget.name in owners:
        return owners[budget.name]
    if budget.name == ARENAS:
        return costs.arenas
    return costs.seams.get(budget.seam) if budget.seam else costs.transports.get(budget.name)


def _exceeded(plan: Plan, graph: Graph, one: Excess) -> Diagnostic:
    budget, cost = one.budget, one.cost
    assert budget.amount is not None
    step = "/step" if budget.amount.per_step else ""
    parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in cost.parts[:SHOWN])
    rest = f", and {len(cost.parts) - SHOWN} more" if len(cost.parts) > SHOWN else ""
    does = f"moves {size_text(one.spent)} a step" if step else f"holds up to {size_text(one.spent)}"
    over = size_text(one.spent - budget.amount.nbytes)
    message = f"{budget.name} {does}, {over} over its budget of {budget.amount.text}: {parts}{rest}"
    return Diagnostic("FG502", budget.place, message, _help(plan, graph, one))


def _help(plan: Plan, graph: Graph, one: Excess) -> str:
    """What brings it under, by compiling with it; where nothing does, what there is to change by hand."""
    budget = one.budget
    assert budget.amount is not None
    step = "/step" if budget.amount.per_step else ""
    off = [name for name in PASSES if name not in plan.passes]
    cut = remedy(graph, off, lambda made: spent(budget, made), budget.amount.nbytes, one.part)
    if cut is None:
        change = f"read less over {one.part}" if step else _smaller(plan, one.part)
        lowest = floor(graph, lambda made: spent(budget, made))
        cut = f"no pass and no dim brings it under, {lowest}{step} is the least: {change}"
    return f"{cut}, or raise the budget to {enough(one.spent)}{step}"


def _smaller(plan: Plan, part: str) -> str:
    hop = plan.hops.get(part.removeprefix("blocks of ").removesuffix(PASSING))
    return (
        "name a smaller model"
        if hop is None or any(c.kind == "tensors" for c in hop.written)
        else f"write less in {hop.name}"
    )
