"""How large the driver's own states may grow: rows, ledgers and the states of folds, as msgpack writes them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from flowgraph.passes.sizes import alive, rows_per_step
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime.ledger import Counts
from flowgraph.runtime.worker import fill
from flowgraph.spec.form import MANY
from flowgraph.spec.types import ROW_KINDS, Row, RowKind

# What a field of a state may be made of, so that it does not grow; and what may hold several rows.
FIXED = {int, float, bool, types.NoneType, types.UnionType, typing.Union}
MANY_ROWS = {list, tuple, dict, set, frozenset}
PARENT: dict[RowKind, RowKind] = {"trajectory": "group", "step": "trajectory"}


def packed(value: Any) -> int:
    return len(msgspec.msgpack.encode(value))


def kinds(plan: Plan) -> Iterator[RowKind]:
    """The kinds of rows that this ring makes."""
    return (kind for kind in ROW_KINDS if any(h.makes_rows and h.rows == kind for h in plan.hops.values()))


def largest(plan: Plan, kind: RowKind) -> Row:
    """A row of a kind at its bound: every length known, with all the rows that it is made from."""
    above = PARENT.get(kind)
    count = int(rows_per_step("trajectory", plan.dims)) if kind == "step" else 1
    parents = (largest(plan, above),) * count if above is not None and above in kinds(plan) else ()
    dims: dict[str, int] = {}
    for hop in plan.hops.values():
        named = [(dim.partition("+")[0], n) for dim, n in zip(hop.dims, hop.bounds, strict=True)]
        dims |= {name: n for name, n in named if hop.rows == kind and name.isidentifier()}
    return Row(kind, MANY, parents, MANY, dims)


def living(plan: Plan, kind: RowKind) -> int:
    """How many rows of a kind are alive at most."""
    return alive(kind, plan.dims, plan.max_lag)


def table_bytes(plan: Plan) -> int:
    """The driver's table: each live row, and where its blocks lie. What a row is made from is there by reference."""
    total = 0
    for kind in kinds(plan):
        row = msgspec.structs.replace(largest(plan, kind), parents=())
        blocks = {h.name: (MANY, h.bounds) for h in plan.hops.values() if h.rows == kind and h.slots}
        total += living(plan, kind) * packed((row, blocks))
    return total


def ledger_bytes(plan: Plan) -> int:
    """The place of every trajectory that is not over, and the counts of all."""
    entry = packed(MANY) + packed("in flight")
    return living(plan, "trajectory") * entry + packed(Counts(MANY, MANY, MANY, MANY))


def firing_bytes(plan: Plan) -> int:
    """Every firing under way: its hop, its row and the block that it writes. One a trajectory, and one a hop."""
    longest = max(plan.hops, key=len)
    return (living(plan, "trajectory") + len(plan.hops)) * packed((MANY, longest, MANY, MANY, 0.5))


class FoldState(msgspec.Struct, frozen=True):
    """The state of one fold. exact: whether no field but rows can grow."""

    fields: tuple[str, ...]
    nbytes: int
    exact: bool


def fold_state(plan: Plan, hop: Hop) -> FoldState:
    """The empty state, and as many rows as it may hold: its `room` when it is empty, else all that live."""
    spec, fixed = fill(hop, dict.fromkeys(hop.resources.values()))
    state, hints = spec.state(), typing.get_type_hints(spec.state)
    seen = [(w.rows, w.mode) for w in hop.watches if w.rows]
    kept = [kind for kind, mode in seen if mode != "event"] or [kind for kind, _ in seen]
    row = max((largest(plan, kind) for kind in kept), key=packed, default=None)
    many = max((living(plan, kind) for kind in kept), default=0)
    if spec.facts.room is not None and not hop.resources:  # there are no resources before a run
        many = spec.facts.room(state, **fixed)
    nbytes, exact = packed(state), True
    for parts in map(_parts, hints.values()):
        if Row in parts:
            nbytes += packed([row] * many) - packed([]) if parts & MANY_ROWS else packed(row) - packed(None)
        exact &= Row in parts or parts <= FIXED
    return FoldState(tuple(hints), nbytes, exact)


def _parts(hint: Any) -> set[Any]:
    """Every class that a type is made of; of a struct that is no row, what its fields are made of."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint is not Row:
        return set().union(*(_parts(field) for field in typing.get_type_hints(hint).values()))
    found = {typing.get_origin(hint) or hint}
    return found.union(*(_parts(a) for a in typing.get_args(hint)))
