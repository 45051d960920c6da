"""diff: each part of two plans by its name, and of those the ones that are not the same in both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from flowgraph.plan.bill import bill
from flowgraph.plan.budgets import cost_of
from flowgraph.plan.plan import Hop, Owner, Plan, Seam
from flowgraph.spec.budgets import BudgetDecl
from flowgraph.spec.dims import Size

T = TypeVar("T")


class Change(msgspec.Struct, Generic[T], frozen=True):
    """One part that differs. before is None for what came, after for what went."""

    name: str
    before: T | None
    after: T | None


class HopFacts(msgspec.Struct, frozen=True):
    """What a graph says of a hop, beside its inputs. options: those under `with:`, nested ones by path."""

    use: str
    owner: str
    queue: int
    every: int
    options: dict[str, Any]


class PortFacts(msgspec.Struct, frozen=True):
    """The type of a port and its promises. source: what an input reads, and by way of which hop."""

    type: str
    facts: tuple[str, ...] = ()
    source: str = ""


class Crossing(msgspec.Struct, frozen=True):
    """How a seam is crossed. Bytes are a step's; priced: whether all of them are known."""

    mean: float
    max: int
    priced: bool
    transport: str
    lifetime: str
    delay: int
    max_lag: int | None
    every: int


class Spent(msgspec.Struct, frozen=True):
    """What a plan spends of a budget. budget: None where the graph has none."""

    nbytes: float
    budget: float | None


class Difference(msgspec.Struct, frozen=True):
    """Everything that differs; false when nothing does.

    settings: dims, the run, and what owners hold, by path (`run.steps`)
    ports: `hop.port` of an output, `hop.in.port` of an input; of hops that both have
    memory: bytes of an owner's arena
    """

    before: str
    after: str
    settings: tuple[Change[Any], ...]
    hops: tuple[Change[HopFacts], ...]
    ports: tuple[Change[PortFacts], ...]
    seams: tuple[Change[Crossing], ...]
    memory: tuple[Change[int], ...]
    budgets: tuple[Change[Spent], ...]

    def __bool__(self) -> bool:
        return any((self.settings, self.hops, self.ports, self.seams, self.memory, self.budgets))

    @property
    def worse(self) -> bool:
        """Whether any budget got worse."""
        return any(map(got_worse, self.budgets))

    def __str__(self) -> str:
        """The text that `flowgraph diff` prints."""
        from flowgraph.report.diff.text import render_text

        return render_text(self)


def diff(before: Plan, after: Plan) -> Difference:
    """What differs between two plans, in the order of `before`, then what came. Names and docs do not count."""
    both = before.hops.keys() & after.hops.keys()
    return Difference(
        before.graph,
        after.graph,
        _changes(_settings(before), _settings(after)),
        _changes(_hops(before), _hops(after)),
        _changes(_ports(before, both), _ports(after, both)),
        _changes(_seams(before), _seams(after)),
        _changes(_memory(before), _memory(after)),
        budget_changes(before, after),
    )


def to_json(difference: Difference) -> bytes:
    return msgspec.json.format(msgspec.json.encode(difference), indent=1)


def _changes(before: Mapping[str, T], after: Mapping[str, T]) -> tuple[Change[T], ...]:
    names = dict.fromkeys((*before, *after))
    changes = (Change(name, before.get(name), after.get(name)) for name in names)
    return tuple(change for change in changes if change.before != change.after)


def flat(path: str, value: object) -> dict[str, Any]:
    """Every leaf of nested mappings by its path; a list is a leaf, and so is an empty mapping."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {p: leaf for key, inner in value.items() for p, leaf in flat(f"{path}.{key}", inner).items()}


# --- the parts of a plan -----------------------------------------------------------------------------------


def _settings(plan: Plan) -> dict[str, Any]:
    out: dict[str, Any] = {f"dims.{name}": _size(size) for name, size in plan.dims.items()}
    out |= flat("run", msgspec.to_builtins(plan.run))
    for owner in plan.owners.values():
        out |= flat(f"owners.{owner.name}", _held(owner))
    return out


def _size(size: Size) -> Any:
    """As a graph writes it: one number when it is fixed."""
    return size.max if size.mean == size.max else msgspec.to_builtins(size)


def _held(owner: Owner) -> dict[str, Any]:
    """What an owner is and holds; its memory has a part of its own."""
    fields: dict[str, Any] = msgspec.to_builtins(owner)
    return {name: value for name, value in fields.items() if name not in ("name", "arena_bytes")}


def _hops(plan: Plan) -> dict[str, HopFacts]:
    return {
        name: HopFacts(
            hop.use, hop.owner, hop.queue, hop.every, flat("with", hop.config) if hop.config else {}
        )
        for name, hop in plan.hops.items()
    }


def _ports(plan: Plan, names: set[str]) -> dict[str, PortFacts]:
    out: dict[str, PortFacts] = {}
    for name, hop in plan.hops.items():
        if name in names:
            out |= {f"{name}.{c.name}": PortFacts(c.type, c.facts) for c in hop.columns}
            out |= {f"{name}.in.{port}": facts for port, facts in _inputs(plan, hop).items()}
    return out


def _inputs(plan: Plan, hop: Hop) -> dict[str, PortFacts]:
    """A column is written as its facts say, which are its writer's; rows and values have none."""
    out = {}
    for seam in plan.seams:
        for field in seam.fields if seam.reader == hop.name else ():
            by = "" if field.producer == seam.source else f" via {seam.source}"
            out[field.port] = PortFacts(field.type, (), f"{field.producer}.{field.column}{by}")
    for watch in hop.watches:
        kind = [f"{watch.rows} rows"] if watch.rows else []
        kind += [watch.mode] if watch.mode != "queue" or not kind else []
        out[watch.port] = PortFacts(", ".join(kind), (), f"{watch.producer}.{watch.output}".removesuffix("."))
    return out


def _seams(plan: Plan) -> dict[str, Crossing]:
    return {f"{seam.source} → {seam.reader}": _crossing(seam) for seam in plan.seams}


def _crossing(seam: Seam) -> Crossing:
    priced = all(field.priced for field in seam.fields)
    return Crossing(
        seam.mean_bytes, seam.max_bytes, priced, seam.crossing, seam.lifetime,
        seam.delay, seam.max_lag, seam.every,
    )  # fmt: skip


def _memory(plan: Plan) -> dict[str, int]:
    return {name: owner.arena_bytes for name, owner in plan.owners.items()}


# --- budgets -----------------------------------------------------------------------------------------------


def budget_changes(before: Plan, after: Plan) -> tuple[Change[Spent], ...]:
    """Every budget of either plan whose amount, or what is spent under it, differs."""
    decls = {(b.name, b.amount.per_step): b for plan in (before, after) for b in plan.budgets if b.amount}
    return _changes(*(_spent(plan, decls) for plan in (before, after)))


def _spent(plan: Plan, decls: Mapping[tuple[str, bool], BudgetDecl]) -> dict[str, Spent]:
    costs, out = bill(plan), {}
    amounts = {(b.name, b.amount.per_step): b.amount.nbytes for b in plan.budgets if b.amount}
    for (name, per_step), decl in decls.items():
        cost = cost_of(costs, decl)
        nbytes = (cost.mean if per_step else cost.max) if cost else 0
        out[name + ("/step" if per_step else "")] = Spent(nbytes, amounts.get((name, per_step)))
    return out


def got_worse(change: Change[Spent]) -> bool:
    """More is spent, or the budget is gone or raised."""
    a, b = change.before, change.after
    assert a is not None
    assert b is not None
    return b.nbytes > a.nbytes or (a.budget is not None and (b.budget is None or b.budget > a.budget))
