"""What carries blocks from who writes them to who reads them. Descriptors are the same whatever does.

A descriptor is an offset in the memory of the block's home, so a transport is no more than these memories as one owner
sees them: its own to write, the others to read.

Shared  between processes of one host: a `memfd` each, passed on by its descriptor. It has no name, so nothing is left
        to unlink however a run ends
Heap    within one process: no descriptor, nothing to pass on
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from flowgraph.errors import MemoryShort
from flowgraph.limits import available
from flowgraph.plan.held import host_bytes, shm_bytes
from flowgraph.plan.plan import Plan
from flowgraph.runtime.arena import Arena
from flowgraph.runtime.pages import Pages
from flowgraph.spec.units import size_text

SHM = "/dev/shm"


class Transport(Protocol):
    """The memories of a run, by owner, for as long as it is open."""

    def open(self, owner: str, places: Collection[str]) -> dict[str, Arena]:
        """These memories as `owner` sees them. What was written before is there."""
        ...

    def close(self) -> None:
        """Nobody opens them any more; those who have keep what they see."""
        ...


class Shared:
    """fds: owner → the descriptor of its memfd, which this process holds."""

    def __init__(self, fds: Mapping[str, int]) -> None:
        self.fds = dict(fds)

    @classmethod
    def create(cls, sizes: Mapping[str, int]) -> Shared:
        made = cls({})
        try:
            for name, size in sizes.items():
                made.fds[name] = os.memfd_create(f"flowgraph-{name}", os.MFD_CLOEXEC)
                os.ftruncate(made.fds[name], size)
        except OSError:
            made.close()
            raise
        return made

    def open(self, owner: str, places: Collection[str]) -> dict[str, Arena]:
        return {name: self._arena(name, writable=name == owner) for name in places}

    def _arena(self, name: str, *, writable: bool) -> Arena:
        fd = self.fds[name]
        return Arena(Pages(fd, os.fstat(fd).st_size, writable=writable))

    def close(self) -> None:
        """The kernel frees the memory with the last descriptor and mapping."""
        while self.fds:
            os.close(self.fds.popitem()[1])


class Heap:
    """Memory of this process alone, taken as blocks come to lie in it."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.arenas = {name: Arena(Pages(-1, size)) for name, size in sizes.items()}

    def open(self, owner: str, places: Collection[str]) -> dict[str, Arena]:
        return {n: self.arenas[n] if n == owner else self.arenas[n].to_read() for n in places}

    def close(self) -> None:
        self.arenas.clear()


@contextmanager
def arenas(plan: Plan, *, alone: bool = False) -> Iterator[Transport]:
    """The memories of all owners for as long as a run lasts. alone: one process holds them all

    Raises MemoryShort when the machine can't hold them.
    """
    check_memory(plan)
    sizes = {name: max(owner.arena_bytes, mmap.PAGESIZE) for name, owner in plan.owners.items()}
    held: Transport = Heap(sizes) if alone else Shared.create(sizes)
    try:
        yield held
    finally:
        held.close()


def check_memory(plan: Plan) -> None:
    """Raises MemoryShort, with both sizes, when the arenas do not fit beside what engines and learners take, or when
    /dev/shm is too small for weights that go through it.
    """
    if (through := shm_bytes(plan)) > (room := shutil.disk_usage(SHM).free if through else 0):
        raise MemoryShort(
            f"weights go through files of {size_text(through)} in {SHM}, and {size_text(room)} are free there",
            f"make {SHM} larger (docker run --shm-size), or take `weights: disk`, which needs none of it",
        )
    total, beside, free = sum(o.arena_bytes for o in plan.owners.values()), host_bytes(plan), available()
    if total + beside <= free:
        return
    also = f" and the engines and learners {size_text(beside)}" if beside else ""
    smaller = "lower dims.response.max, dims.group or max_lag"
    raise MemoryShort(
        f"the arenas take {size_text(total)}{also}, and {size_text(free)} of memory are available",
        smaller if total > free or not beside else f"{smaller}, an engine's slots, or name a smaller model",
    )
