"""Shared memory: one `memfd` an owner, without a name, so nothing is left to unlink however a run ends.

The driver holds the descriptors and is the only allocator. Each hop has a region of equal slots, sized by the
compiler from the bound of its block, so that nothing fragments and a slot's index is its whole state.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from flowgraph.errors import MemoryShort
from flowgraph.memory import available
from flowgraph.plan.plan import Plan
from flowgraph.spec.units import size_text


class Arena:
    """A mapping of one owner's arena. `view` covers it all; a size of 0 maps one page."""

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.view = memoryview(self.map)


def create(plan: Plan) -> dict[str, int]:
    """One memfd an owner → its descriptor. Raises MemoryShort when the machine can't hold them, with both sizes."""
    total = sum(o.arena_bytes for o in plan.owners.values())
    free = available()
    if total > free:
        raise MemoryShort(
            f"the arenas take {size_text(total)}, and {size_text(free)} of memory are available",
            "lower dims.response.max, dims.group or max_lag",
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


class Slots:
    """The driver's ledger of one hop's region: which slots are free. Lowest offset first, so runs repeat."""

    def __init__(self, base: int, size: int, count: int) -> None:
        self.size = size
        self.free = [base + i * size for i in reversed(range(count))]
        self.capacity = count

    @property
    def live(self) -> int:
        return self.capacity - len(self.free)

    def can_allocate(self) -> bool:
        return bool(self.free)

    def allocate(self) -> int:
        return self.free.pop()

    def release(self, offset: int) -> None:
        self.free.append(offset)


class Regions(NamedTuple):
    """Every hop's slots where its blocks are read, and where it writes them; the same but for what is relayed."""

    homes: dict[str, Slots]
    desks: dict[str, Slots]


def regions(plan: Plan) -> Regions:
    """Every hop's region of each arena, in plan order."""
    base: dict[str, int] = dict.fromkeys(plan.owners, 0)
    out = Regions({}, {})
    for name, hop in plan.hops.items():
        for place in dict.fromkeys((hop.owner, hop.home)):
            slots = Slots(base[place], hop.block_bytes, hop.slots)
            base[place] += hop.block_bytes * hop.slots
            if place == hop.owner:
                out.desks[name] = slots
            if place == hop.home:
                out.homes[name] = slots
    return out


def no_regions(plan: Plan) -> Regions:
    """For who drives a ring without payload: nobody writes anywhere."""
    nowhere = {name: Slots(0, 0, 0) for name in plan.hops}
    return Regions(nowhere, nowhere)


def map_all(fds: Mapping[str, int]) -> dict[str, Arena]:
    return {name: Arena(fd) for name, fd in fds.items()}
