"""The plan: all that the runtime needs to run a graph, as one serialisable value. It knows no YAML.

Written by `lower`, read by the driver, every worker, `draw` and `audit`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from flowgraph.engines.registry import EngineOptions
from flowgraph.learners.registry import LearnerOptions
from flowgraph.spec.budgets import BudgetDecl
from flowgraph.spec.dims import Size
from flowgraph.spec.form import RunDecl
from flowgraph.spec.types import Lifetime, RowKind, Transport

# How the values of many rows become one value for a reader on later rows:
#   same    the reader works on the writer's own rows: the value as it is
#   concat  arrays joined along their first dim       offsets  joined, each shifted by those before
#   each    one value a row                            repeat   one value a leaf of the row
Gather = Literal["same", "concat", "offsets", "each", "repeat"]


class TensorSlot(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a named set, at a fixed place of its block."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Column(msgspec.Struct, frozen=True):
    """One value of a row's record. shape: dim expressions; bytes are those of one row.

    crosses: whether any hop reads it; a column that nobody reads is never written
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[str, ...]
    type: str
    facts: tuple[str, ...]
    mean_bytes: float
    max_bytes: int
    crosses: bool
    tensors: tuple[TensorSlot, ...] = ()


class Read(msgspec.Struct, frozen=True):
    """One input port that gets a column. via: the hop whose rows hand it on by reference."""

    port: str
    producer: str
    column: str
    via: str
    gather: Gather


class Watch(msgspec.Struct, frozen=True):
    """One input port that gets a row stream or a value. output: the writer's port; every: only each k-th value."""

    port: str
    producer: str
    output: str
    mode: str
    rows: RowKind | None = None
    every: int = 1


class Hop(msgspec.Struct, frozen=True):
    """One hop, lowered. rows: what it makes or works on, None when only events fire it.

    dims: the names whose sizes a block of its columns records, in order; bounds: the largest of each
    trigger: the hops that must have given a row their part before this one fires on it
    slots: blocks that its region of the arena holds; block_bytes: the bound of one
    outputs: name → the port's kind, or "latest" for rows that are shown and not made
    queue: rows it has made that may wait unread (folds)
    every: it fires on each every-th row only, a multiple of that of every hop before it
    """

    name: str
    use: str
    kind: Literal["hop", "fold", "effect"]
    owner: str
    rows: RowKind | None
    makes_rows: bool
    concurrent: bool
    lifetime: Lifetime
    columns: tuple[Column, ...]
    dims: tuple[str, ...]
    bounds: tuple[int, ...]
    reads: tuple[Read, ...]
    watches: tuple[Watch, ...]
    trigger: tuple[str, ...]
    outputs: dict[str, str]
    initial: dict[str, int]
    config: dict[str, Any]
    bound: dict[str, int]
    resources: dict[str, str]
    uses: str | None
    slots: int
    block_bytes: int
    queue: int
    every: int
    place: str
    doc: str

    def column(self, name: str) -> Column:
        return next(c for c in self.columns if c.name == name)

    @property
    def written(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.crosses)


class Owner(msgspec.Struct, frozen=True):
    """One process. context: the engine's longest prompt plus response, in tokens."""

    name: str
    threads: int
    arena_bytes: int
    engine: EngineOptions | None = None
    learner: LearnerOptions | None = None
    tokenizer: str | None = None
    context: int = 0


class SeamField(msgspec.Struct, frozen=True):
    """One port's share of a seam. Bytes are a step's, as the reader reads them."""

    port: str
    producer: str
    column: str
    type: str
    facts: tuple[str, ...]
    mean_bytes: float
    max_bytes: int
    priced: bool


class Seam(msgspec.Struct, frozen=True):
    """The edge from a hop to a reader. transport: how its bytes cross; rows and values cross as control messages."""

    source: str
    reader: str
    transport: Transport
    lifetime: Lifetime
    fields: tuple[SeamField, ...]
    control: tuple[str, ...]
    delay: int = 0
    max_lag: int | None = None
    every: int = 1

    @property
    def mean_bytes(self) -> float:
        return sum(f.mean_bytes for f in self.fields)

    @property
    def max_bytes(self) -> int:
        return sum(f.max_bytes for f in self.fields)


class Plan(msgspec.Struct, frozen=True):
    """A whole run. executor-independent: the same plan runs in one process or in many."""

    graph: str
    doc: str
    dims: dict[str, Size]
    run: RunDecl
    max_lag: int
    overlap: bool
    owners: dict[str, Owner]
    hops: dict[str, Hop]
    seams: tuple[Seam, ...]
    budgets: tuple[BudgetDecl, ...] = ()

    def workers(self, maker: str) -> frozenset[str]:
        """A fold that makes rows, and every hop that works on them: all must be done before a row is handed on."""
        found = {maker}
        while more := {name for name, h in self.hops.items() if found.intersection(h.trigger)} - found:
            found |= more
        return frozenset(found)

    def fires(self, hop: Hop, key: int) -> bool:
        """Whether a hop fires on the row of this key: each `every`-th, and a run's last step, which nobody may miss."""
        return (key + 1) % hop.every == 0 or (hop.rows == "step" and key + 1 == self.run.steps)

    def readers(self, producer: str, column: str) -> list[tuple[Hop, Read]]:
        return [
            (h, r)
            for h in self.hops.values()
            for r in h.reads
            if r.producer == producer and r.column == column
        ]


def to_json(plan: Plan) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plan), indent=1)


def from_json(data: bytes) -> Plan:
    return msgspec.json.decode(data, type=Plan)
