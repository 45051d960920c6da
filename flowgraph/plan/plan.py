"""The plan: all that the runtime needs to run a graph, as one serialisable value. It knows no YAML.

Written by `lower`, read by the driver, every worker, `draw` and `audit`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from flowgraph.engines.registry import EngineOptions, Push
from flowgraph.learners.registry import LearnerOptions
from flowgraph.spec.budgets import BudgetDecl
from flowgraph.spec.dims import Size
from flowgraph.spec.form import RunDecl
from flowgraph.spec.forms import Form, Prefix, Promise
from flowgraph.spec.types import Lifetime, RowKind, Transport
from flowgraph.spec.units import counted

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
    """One value of a row's record. shape: dim expressions of the value as hops see it.

    read: whether any hop reads it; written: whether it lies in a block. A column that is read and not written is handed
    on within a group, or derived by its readers
    form, stored, stored_shape: how it lies there, in which dtype and shape
    mean_bytes, max_bytes: of one row as it lies, 0 where it does not
    promises: what the hop says of its content, which verify mode checks
    each: bytes that a text or JSON value may have, one by one
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[str, ...]
    type: str
    facts: tuple[str, ...]
    mean_bytes: float
    max_bytes: int
    read: bool
    written: bool
    form: Form | None = None
    stored: str = ""
    stored_shape: tuple[str, ...] = ()
    promises: tuple[Promise, ...] = ()
    tensors: tuple[TensorSlot, ...] = ()
    each: int = 0

    @property
    def opaque(self) -> bool:
        """Whether its size says nothing of dims, so that a block records its bytes."""
        return self.kind != "array" or isinstance(self.form, Prefix)


class Read(msgspec.Struct, frozen=True):
    """One input port that gets a column. via: the hop whose rows hand it on by reference.

    same_rows: whether writer and reader work on the same rows; else the reader gathers many of the writer's
    needs: what the writer had, without which the form of the column can't be undone, or from which it is derived
    derive: import path of the function that makes the value of `needs`
    handed: a hop of the same group made the value, or has read it in the same way, and no byte crosses
    once: a block that several rows share is read once
    narrow: integers are read in the dtype in which they are stored
    """

    port: str
    producer: str
    column: str
    via: str
    gather: Gather
    same_rows: bool = True
    needs: tuple[Read, ...] = ()
    derive: str = ""
    handed: bool = False
    once: bool = False
    narrow: bool = False

    @property
    def crosses(self) -> bool:
        """Whether the column's own bytes are read, out of its writer's block."""
        return not (self.handed or self.derive)

    def as_it_lies(self, column: Column) -> bool:
        """Whether one row's array is read as it is stored."""
        return column.form is None and (self.narrow or column.stored == column.dtype)

    def producers(self) -> frozenset[str]:
        """Every hop whose blocks it takes."""
        own = frozenset([self.producer]) if self.crosses else frozenset()
        return own.union(*(need.producers() for need in self.needs))


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
    group: the hops that fire as one, in order, this one among them; () when it fires by itself
    home: the owner in whose memory its blocks are read: its own, or the driver that they pass through
    slots: blocks that its region of the arena holds; block_bytes: the bound of one
    outputs: name → the port's kind; "latest" for rows that are shown and not made, "handed" for those that go on,
        "held" for how many are to wait
    queue: rows it has made that may wait unread (folds)
    every: it fires on each every-th row only, a multiple of that of every hop before it
    room: rows that a fold lets be in flight, or keeps until they are taken, at its most; None where it does neither
    in_place: columns of whose memory its code asks, in the dtype in which they are stored, see `flowgraph.outputs`
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
    group: tuple[str, ...]
    home: str
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
    room: int | None = None
    in_place: tuple[str, ...] = ()

    def column(self, name: str) -> Column:
        return next(c for c in self.columns if c.name == name)

    @property
    def written(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.written)

    @property
    def checked(self) -> tuple[Column, ...]:
        """Columns whose value is looked at: what somebody gets, be it written or handed on, and every array's size."""
        return tuple(c for c in self.columns if c.read or c.written or c.kind == "array")

    @property
    def takes(self) -> frozenset[str]:
        """Every hop whose blocks it reads."""
        return frozenset().union(*(one.producers() for one in self.reads))

    @property
    def heads(self) -> bool:
        """Whether it is the hop that fires for its group, or for itself."""
        return not self.group or self.group[0] == self.name


class Owner(msgspec.Struct, frozen=True):
    """One process. context: the engine's longest prompt plus response, in tokens.

    threads: as declared, else 0; share: then it gets this part of the machine's cores (2: a half)
    maps: the owners whose memory it reads or writes
    ranks: dim → among how many processes it splits the work, where it is priced for more than one
    """

    name: str
    threads: int
    share: int
    arena_bytes: int
    maps: tuple[str, ...]
    engine: EngineOptions | None = None
    learner: LearnerOptions | None = None
    tokenizer: str | None = None
    context: int = 0
    ranks: dict[str, int] = {}


class SeamField(msgspec.Struct, frozen=True):
    """One port's share of a seam. Bytes are a step's, as the reader reads them.

    driver: mean and bound of the bytes a step of it that pass through the driver's memory
    ranks: of the reader's owner that read it; slice_bytes: mean bytes a step that each of them needs
    split: the dims that are shared out among them, each with the number of its parts
    """

    port: str
    producer: str
    column: str
    type: str
    facts: tuple[str, ...]
    mean_bytes: float
    max_bytes: int
    priced: bool
    driver: tuple[float, int] = (0.0, 0)
    ranks: int = 1
    slice_bytes: float = 0.0
    split: tuple[tuple[str, int], ...] = ()


class Pushed(msgspec.Struct, frozen=True):
    """How weights that a hop read go on into its engine's servers. Bytes a step, to all of them together."""

    by: Push
    servers: int
    mean_bytes: float
    max_bytes: int

    @property
    def text(self) -> str:
        """`then disk to 2 servers`"""
        how = {"tensor": "shared tensors", "distributed": "broadcast"}.get(self.by, self.by)
        return f"then {how} to {counted(self.servers, 'server')}"


class Seam(msgspec.Struct, frozen=True):
    """The edge from a hop to a reader. transport: how its bytes cross; rows and values cross as control messages.

    pushed: what becomes of weights behind the reader; None where they are read where they are
    """

    source: str
    reader: str
    transport: Transport
    lifetime: Lifetime
    fields: tuple[SeamField, ...]
    control: tuple[str, ...]
    delay: int = 0
    max_lag: int | None = None
    every: int = 1
    pushed: Pushed | None = None

    @property
    def crossing(self) -> str:
        """How its bytes cross, to their end."""
        return f"{self.transport}, {self.pushed.text}" if self.pushed else self.transport

    @property
    def mean_bytes(self) -> float:
        return sum(f.mean_bytes for f in self.fields)

    @property
    def max_bytes(self) -> int:
        return sum(f.max_bytes for f in self.fields)


class Plan(msgspec.Struct, frozen=True):
    """A whole run. executor-independent: the same plan runs in one process or in many.

    passes: those that made it; verify: whether every promise and every port is checked while it runs
    unread: hop → mean and bound of the bytes a step that pass through the driver though nobody reads them
    """

    graph: str
    doc: str
    dims: dict[str, Size]
    run: RunDecl
    max_lag: int
    passes: tuple[str, ...]
    verify: bool
    owners: dict[str, Owner]
    hops: dict[str, Hop]
    seams: tuple[Seam, ...]
    budgets: tuple[BudgetDecl, ...] = ()
    unread: dict[str, tuple[float, int]] = {}

    @property
    def overlap(self) -> bool:
        """Whether rollout and training run side by side."""
        return self.max_lag > 0

    @property
    def driver_bytes(self) -> float:
        """Mean payload bytes a step that pass through the driver's memory."""
        return sum(f.driver[0] for s in self.seams for f in s.fields) + sum(
            n for n, _ in self.unread.values()
        )

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
