"""FG502: what the compiled plan costs is within every budget of the graph file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flowgraph.errors import Diagnostic
from flowgraph.passes.sizes import COUNTED
from flowgraph.plan.bill import NOBODY, PASSING, Bill, Cost, bill
from flowgraph.plan.plan import Plan
from flowgraph.spec.budgets import ARENAS, BudgetDecl
from flowgraph.spec.dims import parse
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


def check_budgets(budgets: Sequence[BudgetDecl], plan: Plan) -> Iterator[Diagnostic]:
    """FG502 for every budget that is exceeded."""
    return (_exceeded(plan, one) for one in exceeded(budgets, plan))


def cost_of(costs: Bill, budget: BudgetDecl) -> Cost | None:
    """What the budget is of. None: an owner that no hop has, or a transport that no seam crosses by."""
    assert budget.amount is not None
    owners = costs.traffic if budget.amount.per_step else costs.memory
    if budget.name in owners:
        return owners[budget.name]
    if budget.name == ARENAS:
        return costs.arenas
    return costs.seams.get(budget.seam) if budget.seam else costs.transports.get(budget.name)


def _exceeded(plan: Plan, one: Excess) -> Diagnostic:
    budget, cost = one.budget, one.cost
    assert budget.amount is not None
    step = "/step" if budget.amount.per_step else ""
    parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in cost.parts[:SHOWN])
    rest = f", and {len(cost.parts) - SHOWN} more" if len(cost.parts) > SHOWN else ""
    does = f"moves {size_text(one.spent)} a step" if step else f"holds up to {size_text(one.spent)}"
    over = size_text(one.spent - budget.amount.nbytes)
    message = f"{budget.name} {does}, {over} over its budget of {budget.amount.text}: {parts}{rest}"
    cut = _less(plan, budget, cost, one.part) if step else _smaller(plan, one.part)
    help = f"{cut}, or raise the budget to {enough(one.spent)}{step}"
    return Diagnostic("FG502", budget.place, message, help)


def _less(plan: Plan, budget: BudgetDecl, cost: Cost, largest: str) -> str:
    """What lets fewer bytes cross: the passes that are left out and keep payload off the driver, before all else."""
    off = []
    if budget.name == "driver":
        unread = any(name.endswith(NOBODY) for name, _ in cost.parts)
        off = ["project"] * unread + ["defer"] * ("defer" not in plan.passes)
    return f"leave {' and '.join(off)} on" if off else f"read less over {largest}"


def _smaller(plan: Plan, part: str) -> str:
    """What makes a part of a process's memory smaller."""
    hop = plan.hops.get(part.removeprefix("blocks of ").removesuffix(PASSING))
    if part in ("KV cache", "cached prefixes"):
        return "lower the engine's slots"
    if hop is None or any(c.kind == "tensors" for c in hop.written):
        return "name a smaller model"
    shape = max(hop.written, key=lambda c: c.max_bytes).shape
    names = [name for dim in shape for n in sorted(parse(dim).names) for name in COUNTED.get(n, (n,))]
    named = [f"dims.{name}" for name in dict.fromkeys(names) if name in plan.dims] or ["dims.group"]
    return f"lower the bound of {' or '.join(named)}"
