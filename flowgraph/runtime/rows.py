"""The driver's table of rows: which exist, which hops have given them their part, and where their blocks lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from flowgraph.errors import RunError
from flowgraph.plan.layout import lengths
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime.leases import Region, Regions
from flowgraph.runtime.messages import Block
from flowgraph.spec.types import LIFETIMES, ROW_KINDS, Row

# What most rows have none of is one and the same object: there may be a hundred thousand of them.
NOTHING: Mapping[str, Any] = MappingProxyType({})
NO_DIMS: dict[str, int] = {}

Place = Literal["", "in flight", "ready", "consumed", "dropped"]


class Stage:
    """How far a row has come; rows that wait for the same hops share one.

    left: hops that are not done with it; after: hop → the stage when it is done too, and who is due on the row then
    """

    __slots__ = ("after", "left")

    def __init__(self, left: frozenset[str]) -> None:
        self.left = left
        self.after: dict[str, tuple[Stage, tuple[str, ...]]] = {}


class Kept(NamedTuple):
    """A block of a row, and the lease by which it is freed."""

    block: Block
    lease: int


class Record(msgspec.Struct, eq=False, gc=False):
    """One live row. It is in no cycle: none refers to what is made from it.

    maker: the fold that made it; parents: the rows that it is made from; blocks: hop → its part of the row
    place: of a trajectory, in the ledger; since: when it was dispatched, where whoever runs the ring keeps time
    children: live rows made from it; taken: whether a fold has taken it from its queue; queued: those that will
    whole: every hop is done with it; closed: no hop will take it any more
    """

    row: Row
    maker: str
    stage: Stage
    parents: tuple[Record, ...]
    blocks: Mapping[str, Kept] = NOTHING
    scalars: Mapping[str, float] = NOTHING
    place: Place = ""
    since: float = 0.0
    taken: bool = False
    queued: int = 0
    children: int = 0
    whole: bool = False
    closed: bool = False


class Table:
    """All live rows by kind and key. Rows and blocks are freed here and nowhere else.

    waits: hop → those that must be done with a row before it, and the hops that fire with it, can fire
    places: owner → the regions of its arena, by hop
    stages: what a row waits for → its stage; sampling: groups that trajectories may still be made from, in order
    freed: how often there was room for more: a block was freed, a row taken, a step closed
    """

    def __init__(self, plan: Plan, regions: Regions) -> None:
        self.plan = plan
        self.desks, self.homes, self.gauges = regions
        self.live: dict[str, dict[int, Record]] = {kind: {} for kind in ROW_KINDS}
        self.sampling: deque[Record] = deque()
        self.next_key: dict[str, int] = {}
        self.freed = 0
        workers = {name: hop for name, hop in plan.hops.items() if hop.kind != "fold"}
        self.waits = {n: _waits(plan, h) for n, h in workers.items() if h.rows and h.heads}
        self.followers = {n: [o for o, waits in self.waits.items() if n in waits] for n in plan.hops}
        self.stages: dict[frozenset[str], Stage] = {}
        makers = [name for name, hop in plan.hops.items() if hop.makes_rows]
        self.first = {name: self.stage(plan.workers(name)) for name in makers}
        self.unread = dict.fromkeys(makers, 0)
        self.needs = {name: self._needs(hop) for name, hop in plan.hops.items()}
        self.publishers = [hop for hop in plan.hops.values() if hop.initial]
        self.places: dict[str, list[tuple[str, Region]]] = {name: [] for name in plan.owners}
        for name, hop in plan.hops.items():
            for place in dict.fromkeys((hop.owner, hop.home)):
                region = self.desks[name] if place == hop.owner else self.homes[name]
                if region.capacity:
                    self.places[place].append((name, region))

    def create(self, maker: str, parents: tuple[Row, ...], tag: int) -> Record:
        kind = self.plan.hops[maker].rows
        assert kind is not None
        key = self.next_key.get(kind, 0)
        self.next_key[kind] = key + 1
        live = self.live
        if len(parents) == 1:
            above: tuple[Record, ...] = (live[parents[0].kind][parents[0].key],)
        else:
            above = tuple([live[one.kind][one.key] for one in parents])
        record = Record(Row(kind, key, parents, tag, NO_DIMS), maker, self.first[maker], above)
        live[kind][key] = record
        self.unread[maker] += 1
        if kind == "group":
            self.sampling.append(record)
        for parent in above:
            parent.children += 1
        return record

    def of(self, row: Row) -> Record:
        return self.live[row.kind][row.key]

    def stage(self, left: frozenset[str]) -> Stage:
        if left not in self.stages:
            self.stages[left] = Stage(left)
        return self.stages[left]

    def take(self, record: Record) -> bool:
        """A fold takes a row from its queue. Every hop is done with it, so after the last fold that it is queued for,
        what lives no longer than that is freed, and its maker may make another.

        False when another fold took it before.
        """
        first, record.taken = not record.taken, True
        record.queued -= 1
        if not record.queued:
            self.unread[record.maker] -= 1
            if not record.place:  # it is no trajectory
                self.freed += 1
            elif record.blocks:
                self.free_blocks(record, ("firing", "trajectory"))
        return first

    def lease(self, hop: str) -> dict[str, int]:
        """Hop → a lease, for every hop that fires with this one and writes columns."""
        out = {}
        for name in self.plan.hops[hop].group or (hop,):
            desk = self.desks[name]
            if desk.capacity == 0:
                continue
            if not desk.can_lease():
                raise RunError(
                    f"hop {name} has no free block: {desk.capacity} are alive",
                    f"let {hop} make no more rows than dims and max_lag admit, or raise max_lag",
                )
            out[name] = desk.lease(self.plan.hops[name].owner)
        return out

    def unlease(self, leases: Mapping[str, int]) -> None:
        """Nothing was written by these."""
        self.freed += 1
        for name, lease in leases.items():
            self.desks[name].release(lease)

    def can_lease(self, hop: str) -> bool:
        """Whether there is a block to write, and one to keep it in, for every hop that fires with this one."""
        for desk, home in self.needs[hop]:
            # What is written elsewhere, and has not come home yet, has its place taken already.
            if not desk.can_lease() or (desk is not home and home.live + desk.live >= home.capacity):
                return False
        return True

    def _needs(self, hop: Hop) -> list[tuple[Region, Region]]:
        """Where the hops that fire with this one write columns, and where those are kept."""
        pairs = [(self.desks[name], self.homes[name]) for name in hop.group or (hop.name,)]
        return [(desk, home) for desk, home in pairs if desk.capacity]

    def land(self, hop: str, lease: int, offset: int, nbytes: int) -> int:
        """A block moves to its home in the driver's memory, at `offset` there. Returns its lease there."""
        self.freed += 1
        self.desks[hop].release(lease)
        lease = self.homes[hop].lease(self.plan.hops[hop].home)
        self.homes[hop].settle(lease, offset, nbytes)
        return lease

    def told(self, owner: str) -> dict[str, list[int]]:
        """Hop → offsets of the blocks that are over, of which this owner, who places them, has not heard yet."""
        out = {}
        for name, region in self.places[owner]:
            if region.freed:
                out[name], region.freed = region.freed, []
        return out

    def give(self, record: Record, hop: str, kept: Kept | None, sizes: tuple[int, ...]) -> None:
        """A hop gave its part of a row. A trajectory's lengths become visible to folds."""
        if kept is not None:
            record.blocks = {**record.blocks, hop: kept}
        if sizes:
            known = lengths(self.plan.hops[hop], sizes)
            record.row = msgspec.structs.replace(record.row, dims={**record.row.dims, **known})

    def after(self, stage: Stage, hop: str) -> tuple[Stage, tuple[str, ...]]:
        """The stage of a row with which this hop has nothing more to do, and the hops that are due on it then."""
        left = stage.left - {hop}
        due = tuple(name for name in self.followers[hop] if left.isdisjoint(self.waits[name]))
        stage.after[hop] = self.stage(left), due
        return stage.after[hop]

    def blocks(self, row: Row, producer: str) -> list[Block]:
        """The producer's blocks that a reader of `row` gathers: its own, or those of the rows it is made from."""
        kind = self.plan.hops[producer].rows
        rows: Iterable[Row] = (row,)
        while rows and next(iter(rows)).kind != kind:
            rows = [parent for one in rows for parent in one.parents]
        return [self.of(one).blocks[producer].block for one in rows]

    def free_blocks(self, record: Record, lifetimes: Collection[str]) -> None:
        self.freed += 1
        over = [hop for hop in record.blocks if self.plan.hops[hop].lifetime in lifetimes]
        for hop in over:
            self.homes[hop].release(record.blocks[hop].lease)
        record.blocks = {hop: block for hop, block in record.blocks.items() if hop not in over}

    def close(self, record: Record) -> None:
        """No hop will take this row any more: free it as soon as no live row is made from it, and its parents then too.

        Published weights outlive their step; `expire` frees them.
        """
        record.closed = True
        if record.children:
            return
        if record.blocks:
            kept = "version" if self._is_published(record.row) else ""
            self.free_blocks(record, [life for life in LIFETIMES if life != kept])
        for above in record.parents:
            above.children -= 1
            if above.closed and not above.children:
                self.close(above)
        if not record.blocks:
            del self.live[record.row.kind][record.row.key]

    def _is_published(self, row: Row) -> bool:
        return row.kind == "step" and any(self.plan.fires(hop, row.key) for hop in self.publishers)

    def close_groups_before(self, group: Row) -> None:
        """A later group is being sampled: no more trajectories come from the earlier ones."""
        waiting = []
        while self.sampling and self.sampling[0].row.key < group.key:
            record = self.sampling.popleft()
            if not record.taken or record.queued:
                waiting.append(record)
            elif not record.closed:
                self.close(record)
        self.sampling.extendleft(reversed(waiting))

    def expire(self, before: int) -> None:
        """A new version is out: weights of steps before `before` are dead."""
        steps = self.live["step"]
        for key in [key for key, record in steps.items() if key < before and record.closed]:
            self.free_blocks(steps.pop(key), ("version",))


def _waits(plan: Plan, hop: Hop) -> frozenset[str]:
    """What a group waits for: what any of its hops waits for, but for each other."""
    group = hop.group or (hop.name,)
    return frozenset(t for name in group for t in plan.hops[name].trigger) - frozenset(group)
