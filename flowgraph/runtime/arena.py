"""An owner's memory: where each hop's blocks lie in it, and when its pages are taken.

Each hop has an area of its own in the arena of whoever writes its blocks, as large as the blocks that may be alive at
once, each at its bound. An area is address space: a page is taken when a block first lies in it, and stays until the
run ends.
"""

from __future__ import annotations

import errno
import mmap
from typing import NamedTuple

from flowgraph.errors import MemoryShort
from flowgraph.plan.parts import by_row
from flowgraph.plan.plan import Plan
from flowgraph.runtime.pages import LARGE, MADV_POPULATE_WRITE, Pages
from flowgraph.spec.units import size_text

CHUNK = 1 << 18  # bytes taken at once: about 0.1 ms, half of what a fault for each page takes


class Area(NamedTuple):
    """Where a hop's blocks lie in an arena: `frames` of `size` bytes."""

    base: int
    size: int
    frames: int


class Arena:
    """One owner's memory as a process has mapped it. `view` covers it all.

    taken: whether each chunk's pages have been taken here, by whoever writes. Readers need not: the kernel maps pages
    that are there sixteen at a time, as fast as when it is asked to beforehand
    """

    def __init__(self, memory: Pages, view: memoryview | None = None) -> None:
        self.map = memory
        self.view = memory.view if view is None else view
        self.taken = bytearray(-(-len(memory) // CHUNK))

    def to_read(self) -> Arena:
        """The same memory, for who only reads it."""
        return Arena(self.map, self.view.toreadonly())

    def populate(self, start: int, nbytes: int) -> None:
        """Take the pages of these bytes, where that was not done before, at once and not by a fault each.

        Raises MemoryShort when there is no memory for them. A kernel that can't do it gives each page on its first use.
        """
        size = len(self.map)
        self._take_large(-(-start // LARGE) * LARGE, (start + nbytes) // LARGE * LARGE)
        for chunk in range(start // CHUNK, -(-(start + nbytes) // CHUNK)):
            if self.taken[chunk]:
                continue
            self.taken[chunk] = True
            begin = chunk * CHUNK
            try:
                self.map.advise(MADV_POPULATE_WRITE, begin, min(CHUNK, size - begin))
            except OSError as error:
                if error.errno == errno.EINVAL:
                    continue
                message = (
                    f"an arena of {size_text(size)} can't take {size_text(CHUNK)} more: {error.strerror}"
                )
                raise MemoryShort(message, "let less else run on this machine") from error

    def _take_large(self, start: int, end: int) -> None:
        """Take what is wholly within a block in large pages, if nothing of it was taken before."""
        chunks = slice(start // CHUNK, end // CHUNK)
        if start < end and not any(self.taken[chunks]) and self.map.take_large(start, end):
            self.taken[chunks] = b"\1" * (chunks.stop - chunks.start)

    @property
    def resident(self) -> int:
        """Bytes of the chunks that were taken."""
        return min(len(self.map), sum(self.taken) * CHUNK)


def part_areas(plan: Plan, owner: str) -> dict[str, Area]:
    """Hop → where a process of several puts its part of what the hop gives for each row; one, until all are joined."""
    out: dict[str, Area] = {}
    base = 0
    for name, hop in plan.hops.items():
        if hop.owner == owner and plan.processes(hop) > 1 and hop.slots and by_row(hop):
            out[name] = Area(base, hop.block_bytes, 1)
            base += hop.block_bytes
    return out


def part_bytes(plan: Plan, owner: str) -> int:
    """Bytes of memory in which these areas lie."""
    return max(mmap.PAGESIZE, sum(area.size for area in part_areas(plan, owner).values()))


def areas(plan: Plan) -> dict[str, dict[str, Area]]:
    """Owner → hop → where its blocks lie in that owner's arena, in plan order.

    A hop has an area where it writes them and, when they pass through the driver, one where they are read.
    """
    base: dict[str, int] = dict.fromkeys(plan.owners, 0)
    out: dict[str, dict[str, Area]] = {name: {} for name in plan.owners}
    for name, hop in plan.hops.items():
        for place in dict.fromkeys((hop.owner, hop.home)):
            out[place][name] = Area(base[place], hop.block_bytes, hop.slots)
            base[place] += hop.block_bytes * hop.slots
    return out
