"""Shared memory: one `memfd` an owner, without a name, so nothing is left to unlink however a run ends.

The driver holds the descriptors. Each hop has an area of its own in the arena of whoever writes its blocks, as large as
the blocks that may be alive at once, each at its bound. An area is address space: a page is taken when a block first
lies in it, and stays until the run ends.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from flowgraph.errors import MemoryShort
from flowgraph.memory import available
from flowgraph.plan.held import host_bytes
from flowgraph.plan.plan import Plan
from flowgraph.spec.units import size_text

MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
CHUNK = 1 << 18  # bytes taken at once: about 0.1 ms, half of what a fault for each page takes


class Area(NamedTuple):
    """Where a hop's blocks lie in an arena: `frames` of `size` bytes."""

    base: int
    size: int
    frames: int


class Arena:
    """A mapping of one owner's arena. `view` covers it all; a size of 0 maps one page.

    writable: else the kernel refuses a write, by a signal; taken: whether each chunk's pages have been taken
    """

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        self.size = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self.view = memoryview(self.map)
        self.taken = bytearray(-(-self.size // CHUNK))

    def populate(self, start: int, nbytes: int) -> None:
        """Take the pages of these bytes, where that was not done before, at once and not by a fault each.

        Raises MemoryShort when there is no memory for them. A kernel that can't do it gives each page on its first use.
        """
        for chunk in range(start // CHUNK, -(-(start + nbytes) // CHUNK)):
            if self.taken[chunk]:
                continue
            self.taken[chunk] = True
            begin = chunk * CHUNK
            try:
                self.map.madvise(MADV_POPULATE_WRITE, begin, min(CHUNK, self.size - begin))
            except OSError as error:
                if error.errno == errno.EINVAL:
                    continue
                message = f"an arena of {size_text(self.size)} can't take {size_text(CHUNK)} more"
                raise MemoryShort(
                    f"{message}: {error.strerror}", "let less else run on this machine"
                ) from error

    @property
    def resident(self) -> int:
        """Bytes of the chunks that were taken."""
        return min(self.size, sum(self.taken) * CHUNK)


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


def create(plan: Plan) -> dict[str, int]:
    """One memfd an owner → its descriptor.

    Raises MemoryShort when the machine can't hold them beside what engines and learners are sure to take.
    """
    total, beside, free = sum(o.arena_bytes for o in plan.owners.values()), host_bytes(plan), available()
    if total + beside > free:
        also = f" and the engines and learners {size_text(beside)}" if beside else ""
        smaller = "lower dims.response.max, dims.group or max_lag"
        raise MemoryShort(
            f"the arenas take {size_text(total)}{also}, and {size_text(free)} of memory are available",
            smaller
            if total > free or not beside
            else f"{smaller}, an engine's slots, or name a smaller model",
        )
    fds = {}
    for name, owner in plan.owners.items():
        fd = os.memfd_create(f"flowgraph-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(owner.arena_bytes, mmap.PAGESIZE))
        fds[name] = fd
    return fds


@contextmanager
def arenas(plan: Plan) -> Iterator[dict[str, int]]:
    """The memfds of `create` for as long as a run lasts: the kernel frees the memory with the last descriptor."""
    fds = create(plan)
    try:
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


def map_all(fds: Mapping[str, int], owner: str) -> dict[str, Arena]:
    """These arenas as `owner` sees them: its own to write, the others to read."""
    return {name: Arena(fd, writable=name == owner) for name, fd in fds.items()}
