"""FG503: what `budgets:` names is there, and is measured in what the budget gives."""

from __future__ import annotations

import typing
from collections.abc import Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph
from flowgraph.spec.budgets import ARENAS, BudgetDecl
from flowgraph.spec.reader import near
from flowgraph.spec.types import Transport

# Control messages are measured, not predicted, and no byte crosses a fused seam: a budget of either could never fail.
TRANSPORTS = tuple(t for t in typing.get_args(Transport) if t not in ("control", "fused"))


def check_budgets(graph: Graph) -> Iterator[Diagnostic]:
    """FG503, for every name and amount. Whether a budget is kept shows only when the graph is lowered."""
    seams = _seams(graph)
    for budget in graph.file.budgets:
        if budget.name in graph.file.owners:
            continue
        if budget.name == ARENAS:
            if budget.amount is not None and budget.amount.per_step:
                message = f"{ARENAS} is held and not moved, so {budget.amount.text} is no budget of it"
                help = f"write {budget.amount.text.partition('/')[0].strip()}"
                yield Diagnostic("FG503", budget.place, message, help)
        elif budget.name in TRANSPORTS or budget.seam in seams:
            if budget.amount is not None and not budget.amount.per_step:
                what = "a seam" if budget.seam in seams else "a transport"
                message = f"{what} moves bytes and holds none, so {budget.amount.text} is no budget of it"
                yield Diagnostic("FG503", budget.place, message, f"write {budget.amount.text}/step")
        elif not graph.file.partial & {"hops", "owners"}:
            yield _unknown(graph, budget, seams)


def _seams(graph: Graph) -> set[tuple[str, str]]:
    """(source, reader), as the file writes them, so that what else is wrong with an input does not matter here."""
    hops = graph.file.hops
    return {(i.ref.partition(".")[0], name) for name, hop in hops.items() for i in hop.inputs.values()}


def _unknown(graph: Graph, budget: BudgetDecl, seams: set[tuple[str, str]]) -> Diagnostic:
    known = [f"{source} -> {reader}" for source, reader in sorted(seams)]
    if budget.seam is None:
        names = [*graph.file.owners, *TRANSPORTS, ARENAS]
        message = f"budgets names {budget.name!r}, which is no owner, seam or transport here"
        seam = known[0] if known else "source -> reader"
        help = f"{near(budget.name, [*names, *known])}known: {', '.join(names)}, and seams as `{seam}`"
    else:
        source, reader = budget.seam
        message = f"budgets names the seam {source} -> {reader}, and no such seam is there"
        help = _there(graph, source, reader, seams)
    return Diagnostic("FG503", budget.at, message, help)


def _there(graph: Graph, source: str, reader: str, seams: set[tuple[str, str]]) -> str:
    """The seam that was meant, and those beside it: one that hands on what the source wrote, else the nearest."""
    same = [f"{s} -> {r}" for s, r in sorted(seams) if r == reader]
    beside = [f"{s} -> {r}" for s, r in sorted(seams) if source == s or reader == r]
    beside = beside or [f"{s} -> {r}" for s, r in sorted(seams)]
    reads = graph.nodes[reader].bindings if reader in graph.nodes else []
    handed = [f"{b.via} -> {reader}" for b in reads if b.producer == source]
    hint = f"did you mean {handed[0]}? " if handed else near(f"{source} -> {reader}", same or beside)
    return f"{hint}seams there: {', '.join(beside)}"
