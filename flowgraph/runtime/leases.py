"""Who holds which block: the driver's side of the arenas. It counts blocks and says which may go; it places none.

A block begins as a lease: a firing may write one. Whoever writes it places it in its own arena, when its sizes are
known, and says where (`settle`). It ends with `release`. A lease is a number that is never given twice, so what comes
late from a process that has ended names a lease that is no more, and is refused.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from flowgraph.errors import LedgerError
from flowgraph.plan.plan import Plan
from flowgraph.runtime.arena import Area, areas


class Holding(msgspec.Struct, gc=False):
    """What is known of one lease. offset: of its block, -1 until it is written; nbytes: of payload in it"""

    owner: str
    offset: int = -1
    nbytes: int = 0


class Gauge(msgspec.Struct):
    """How one arena is used, in bytes.

    size: of all areas; live: in blocks; used: of the frames in which a block lies
    high_water: the furthest that blocks have reached in each area, added up
    most: the most that was live, and most_used: in so many bytes of frames
    """

    size: int = 0
    live: int = 0
    used: int = 0
    high_water: int = 0
    most: int = 0
    most_used: int = 0

    def add(self, nbytes: int, frames: int) -> None:
        """A block of `nbytes` more, in so many bytes of frames that were empty; or less, where they are negative."""
        self.live += nbytes
        self.used += frames
        if self.live > self.most:
            self.most, self.most_used = self.live, self.used

    def now(self) -> dict[str, float]:
        """fragmentation: the share of the frames in use where no block lies, so that no full block fits there"""
        free = _share_free(self.live, self.used)
        return {"live": self.live, "high_water": self.high_water, "fragmentation": free}

    def run(self) -> dict[str, float]:
        """The same of a whole run: fragmentation is that when most was live."""
        free = _share_free(self.most, self.most_used)
        return {**self.now(), "size": self.size, "most": self.most, "fragmentation": free}


def _share_free(live: int, used: int) -> float:
    return round(1 - live / used, 4) if used else 0.0


class Region:
    """One hop's blocks in one arena: at most as many as it has frames.

    freed: offsets of blocks that are over, of which whoever places them has yet to hear
    """

    def __init__(self, hop: str, area: Area, gauge: Gauge | None = None) -> None:
        self.hop, self.area = hop, area
        self.gauge = gauge or Gauge()
        self.gauge.size += area.size * area.frames
        self.leases: dict[int, Holding] = {}
        self.freed: list[int] = []
        self.next = self.high_water = 0
        self.frames: Counter[int] = Counter()

    @property
    def capacity(self) -> int:
        return self.area.frames

    @property
    def live(self) -> int:
        """Leases that are under way, and blocks that are kept."""
        return len(self.leases)

    def can_lease(self) -> bool:
        return len(self.leases) < self.area.frames

    def lease(self, owner: str) -> int:
        """A process of this owner may write one block."""
        assert self.can_lease(), f"all {self.capacity} blocks of {self.hop} are alive"
        self.next += 1
        self.leases[self.next] = Holding(owner)
        return self.next

    def settle(self, lease: int, offset: int, nbytes: int) -> None:
        """The block is written. Raises LedgerError for a lease that is no more."""
        held = self._of(lease, "writes a block")
        assert held.offset < 0, f"lease {lease} of {self.hop} is settled"
        held.offset, held.nbytes = offset, nbytes
        at = offset - self.area.base
        frame = at // self.area.size
        self.gauge.add(nbytes, 0 if self.frames[frame] else self.area.size)
        self.frames[frame] += 1
        if at + nbytes > self.high_water:
            self.gauge.high_water += at + nbytes - self.high_water
            self.high_water = at + nbytes

    def release(self, lease: int) -> None:
        """Nobody reads the block any more, or none was written. Raises LedgerError for a lease that is no more."""
        self._end(lease, self._of(lease, "frees a block"))

    def reclaim(self, owner: str) -> list[int]:
        """The owner's process has ended: what it leased and did not hand over is free. Returns those leases."""
        lost = [n for n, held in self.leases.items() if held.owner == owner and held.offset < 0]
        for lease in lost:
            self._end(lease, self.leases[lease])
        return lost

    def at(self, lease: int) -> Holding:
        """Where a block lies. Raises LedgerError for a lease that is no more."""
        return self._of(lease, "reads a block")

    def _of(self, lease: int, does: str) -> Holding:
        held = self.leases.get(lease)
        if held is None:
            text = f"who {does} of {self.hop} names lease {lease}, and that is over: released, or its holder ended"
            raise LedgerError(text, "use no block after its lifetime, or after its process was replaced")
        return held

    def _end(self, lease: int, held: Holding) -> None:
        del self.leases[lease]
        if held.offset < 0:
            return
        self.freed.append(held.offset)
        frame = (held.offset - self.area.base) // self.area.size
        self.frames[frame] -= 1
        self.gauge.add(-held.nbytes, 0 if self.frames[frame] else -self.area.size)


class Regions(NamedTuple):
    """Every hop's region where it writes its blocks, and where they are read; the same but for what is relayed.

    gauges: owner → how its arena is used
    """

    desks: dict[str, Region]
    homes: dict[str, Region]
    gauges: dict[str, Gauge]


def regions(plan: Plan) -> Regions:
    """Every hop's region of each arena, in plan order."""
    gauges = {place: Gauge() for place in plan.owners}
    found = {
        place: {name: Region(name, area, gauges[place]) for name, area in hops.items()}
        for place, hops in areas(plan).items()
    }
    desks = {name: found[hop.owner][name] for name, hop in plan.hops.items()}
    homes = {name: found[hop.home][name] for name, hop in plan.hops.items()}
    return Regions(desks, homes, gauges)


def no_regions(plan: Plan) -> Regions:
    """For who drives a ring without payload: nobody writes anywhere."""
    nowhere = {name: Region(name, Area(0, 0, 0)) for name in plan.hops}
    return Regions(nowhere, nowhere, {})
