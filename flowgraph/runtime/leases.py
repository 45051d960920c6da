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


class Holding(msgspec.Struct):
    """What is known of one lease. offset: of its block, -1 until it is written; nbytes: of payload in it"""

    owner: str
    offset: int = -1
    nbytes: int = 0


class Usage(NamedTuple):
    """Bytes of an arena, or of a part of it.

    size: of all frames; live: payload in blocks; high_water: the most that was reached, from the start of each area
    used: frames in which a block lies
    """

    size: int = 0
    live: int = 0
    high_water: int = 0
    used: int = 0

    @property
    def fragmentation(self) -> float:
        """The share of the frames in use that holds no payload: bytes that no full block fits into."""
        return 1 - self.live / self.used if self.used else 0.0


class Region:
    """One hop's blocks in one arena: at most as many as it has frames.

    freed: offsets of blocks that are over, of which whoever places them has yet to hear
    """

    def __init__(self, hop: str, area: Area) -> None:
        self.hop, self.area = hop, area
        self.leases: dict[int, Holding] = {}
        self.freed: list[int] = []
        self.next = 0
        self.live_bytes = self.high_water = 0
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
        self.live_bytes += nbytes
        self.high_water = max(self.high_water, at + nbytes)
        self.frames[at // self.area.size] += 1

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

    def usage(self) -> Usage:
        area = self.area
        return Usage(area.size * area.frames, self.live_bytes, self.high_water, area.size * len(self.frames))

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
        self.live_bytes -= held.nbytes
        frame = (held.offset - self.area.base) // self.area.size
        self.frames[frame] -= 1
        if not self.frames[frame]:
            del self.frames[frame]


class Regions(NamedTuple):
    """Every hop's region where it writes its blocks, and where they are read; the same but for what is relayed."""

    desks: dict[str, Region]
    homes: dict[str, Region]


def regions(plan: Plan) -> Regions:
    """Every hop's region of each arena, in plan order."""
    found = {place: {n: Region(n, area) for n, area in hops.items()} for place, hops in areas(plan).items()}
    hops = plan.hops.items()
    return Regions({n: found[h.owner][n] for n, h in hops}, {n: found[h.home][n] for n, h in hops})


def no_regions(plan: Plan) -> Regions:
    """For who drives a ring without payload: nobody writes anywhere."""
    nowhere = {name: Region(name, Area(0, 0, 0)) for name in plan.hops}
    return Regions(nowhere, nowhere)
