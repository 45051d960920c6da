"""The driver's table of rows: which exist, which hops have given them their part, and where their blocks lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from flowgraph.errors import RunError
from flowgraph.plan.layout import lengths
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime.arena import Regions, Slots
from flowgraph.runtime.messages import Block
from flowgraph.spec.types import LIFETIMES, ROW_KINDS, Row

# What most rows have none of is one and the same object: there may be a hundred thousand of them.
NOTHING: Mapping[str, Any] = MappingProxyType({})
NO_DIMS: dict[str, int] = {}


class Record(msgspec.Struct, eq=False):
    """One live row.

    maker: the fold that made it; blocks: hop → its part of the row; left: hops that are not done with it yet
    children: live rows made from it; taken: whether a fold has taken it from its queue; queued: those that will
    whole: every hop is done with it; closed: no hop will take it any more
    """

    row: Row
    maker: str
    left: frozenset[str]
    blocks: Mapping[str, Block] = NOTHING
    scalars: Mapping[str, float] = NOTHING
    taken: bool = False
    queued: int = 0
    children: int = 0
    whole: bool = False
    closed: bool = False


class Table:
    """All live rows by kind and key. Rows and blocks are freed here and nowhere else.

    sampling: groups that trajectories may still be made from, in order
    freed: how often there was room for more: a block was freed, a row taken, a step closed
    """

    def __init__(self, plan: Plan, regions: Regions) -> None:
        self.plan, self.slots, self.desks = plan, regions.homes, regions.desks
        self.live: dict[str, dict[int, Record]] = {kind: {} for kind in ROW_KINDS}
        self.sampling: deque[Record] = deque()
        self.next_key: dict[str, int] = {}
        self.freed = 0
        self.less: dict[tuple[frozenset[str], str], frozenset[str]] = {}
        self.workers = {name: plan.workers(name) for name, hop in plan.hops.items() if hop.makes_rows}
        self.unread = dict.fromkeys(self.workers, 0)
        self.needs = {name: self._needs(hop) for name, hop in plan.hops.items()}
        self.publishers = [hop for hop in plan.hops.values() if hop.initial]

    def create(self, maker: str, parents: tuple[Row, ...], tag: int) -> Record:
        kind = self.plan.hops[maker].rows
        assert kind is not None
        key = self.next_key.get(kind, 0)
        self.next_key[kind] = key + 1
        record = Record(Row(kind, key, parents, tag, NO_DIMS), maker, self.workers[maker])
        self.live[kind][key] = record
        self.unread[maker] += 1
        if kind == "group":
            self.sampling.append(record)
        for parent in parents:
            self.of(parent).children += 1
        return record

    def of(self, row: Row) -> Record:
        return self.live[row.kind][row.key]

    def take(self, row: Row) -> bool:
        """A fold takes a row from its queue. Every hop is done with it, so after the last fold that it is queued for,
        what lives no longer than that is freed, and its maker may make another.

        False when another fold took it before.
        """
        record = self.live[row.kind].get(row.key)
        if record is None:
            return False
        first, record.taken = not record.taken, True
        record.queued -= 1
        if not record.queued:
            self.unread[record.maker] -= 1
            if row.kind == "trajectory":
                self.free_blocks(record, ("firing", "trajectory"))
            else:
                self.freed += 1
        return first

    def lease(self, hop: str) -> dict[str, int]:
        """Hop → a free block, for every hop that fires with this one and writes columns."""
        out = {}
        for name in self.plan.hops[hop].group or (hop,):
            slots = self.desks[name]
            if slots.capacity == 0:
                continue
            if not slots.can_allocate():
                raise RunError(
                    f"hop {name} has no free block: {slots.capacity} are alive",
                    f"let {hop} make no more rows than dims and max_lag admit, or raise max_lag",
                )
            out[name] = slots.allocate()
        return out

    def unlease(self, leases: Mapping[str, int]) -> None:
        """Blocks that nothing was written to are free again."""
        self.freed += 1
        for name, offset in leases.items():
            self.desks[name].release(offset)

    def can_lease(self, hop: str) -> bool:
        """Whether there is a block to write, and one to keep it in, for every hop that fires with this one."""
        for desk, home in self.needs[hop]:
            # What is written elsewhere, and has not come home yet, has its place taken already.
            if not desk.can_allocate() or (desk is not home and len(home.free) <= desk.live):
                return False
        return True

    def _needs(self, hop: Hop) -> list[tuple[Slots, Slots]]:
        """Where the hops that fire with this one write columns, and where those are kept."""
        pairs = [(self.desks[name], self.slots[name]) for name in hop.group or (hop.name,)]
        return [(desk, home) for desk, home in pairs if desk.capacity]

    def land(self, hop: str, offset: int) -> int:
        """A block that moves to its home in the driver's memory: the place there, and the one it leaves is free."""
        self.freed += 1
        self.desks[hop].release(offset)
        return self.slots[hop].allocate()

    def give(self, record: Record, hop: str, offset: int, sizes: tuple[int, ...]) -> None:
        """A hop is done with a row, written or not. A trajectory's lengths become visible to folds."""
        self.leaves(record, hop)
        if offset >= 0:
            record.blocks = {**record.blocks, hop: Block(offset, sizes)}
        if sizes:
            known = lengths(self.plan.hops[hop], sizes)
            record.row = msgspec.structs.replace(record.row, dims={**record.row.dims, **known})

    def leaves(self, record: Record, hop: str) -> None:
        """A hop has nothing more to do with a row. Rows that wait for the same hops share what they wait for."""
        key = record.left, hop
        if key not in self.less:
            self.less[key] = record.left - {hop}
        record.left = self.less[key]

    def blocks(self, row: Row, producer: str) -> list[Block]:
        """The producer's blocks that a reader of `row` gathers: its own, or those of the rows it is made from."""
        kind = self.plan.hops[producer].rows
        rows: Iterable[Row] = (row,)
        while rows and next(iter(rows)).kind != kind:
            rows = [parent for one in rows for parent in one.parents]
        return [self.of(one).blocks[producer] for one in rows]

    def free_blocks(self, record: Record, lifetimes: Collection[str]) -> None:
        if not record.blocks:
            return
        self.freed += 1
        over = [hop for hop in record.blocks if self.plan.hops[hop].lifetime in lifetimes]
        for hop in over:
            self.slots[hop].release(record.blocks[hop].offset)
        record.blocks = {hop: block for hop, block in record.blocks.items() if hop not in over}

    def close(self, record: Record) -> None:
        """No hop will take this row any more: free it as soon as no live row is made from it, and its parents then too.

        Published weights outlive their step; `expire` frees them.
        """
        record.closed = True
        if record.children:
            return
        kept = "version" if self._is_published(record.row) else ""
        self.free_blocks(record, [life for life in LIFETIMES if life != kept])
        for parent in record.row.parents:
            above = self.of(parent)
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
