"""check: the table of seam checks. Each is a function Graph → findings; none stops another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph
from flowgraph.passes.check_balance import check_balance, check_leaves
from flowgraph.passes.check_budgets import check_budgets
from flowgraph.passes.check_dims import check_dims, check_tokens
from flowgraph.passes.check_events import check_events
from flowgraph.passes.check_limits import check_limits
from flowgraph.passes.check_owners import (
    check_agreement,
    check_lifetimes,
    check_owners,
    check_single_writer,
    check_unread_owners,
)
from flowgraph.passes.check_rates import (
    check_admits,
    check_capacity,
    check_lag,
    check_rows,
    check_steps,
)
from flowgraph.passes.check_said import check_said
from flowgraph.passes.check_state import check_hidden, check_leaks
from flowgraph.passes.check_training import check_training
from flowgraph.passes.check_types import check_dtypes, check_maps, check_memory, check_shapes
from flowgraph.passes.ranks import check_ranks
from flowgraph.passes.staleness import check_staleness

CHECKS: tuple[Callable[[Graph], Iterator[Diagnostic]], ...] = (
    check_dtypes,
    check_shapes,
    check_maps,
    check_dims,
    check_tokens,
    check_memory,
    check_owners,
    check_unread_owners,
    check_single_writer,
    check_lifetimes,
    check_agreement,
    check_hidden,
    check_leaks,
    check_lag,
    check_staleness,
    check_rows,
    check_steps,
    check_capacity,
    check_admits,
    check_balance,
    check_leaves,
    check_events,
    check_said,
    check_budgets,
    check_limits,
    check_training,
    check_ranks,
)


def check(graph: Graph) -> list[Diagnostic]:
    """All findings of all checks, in no particular order."""
    return [d for one in CHECKS for d in one(graph)]
