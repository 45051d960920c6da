"""Where an owner puts what its hops write: it places blocks in its own arena, when their sizes are known.

The driver says how many it may write, and which are over; so no message is waited for, and a block takes no more room
than it has bytes.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowgraph.errors import PayloadError
from flowgraph.plan.layout import spans
from flowgraph.plan.plan import Column, Hop
from flowgraph.runtime import writing
from flowgraph.runtime.arena import Area, Arena
from flowgraph.runtime.buddy import Buddy
from flowgraph.runtime.copying import address
from flowgraph.runtime.reading import Inputs
from flowgraph.spec.forms import PLACE, Prefix


class Stored(NamedTuple):
    """A block that was written.

    offset: -1 where there is none; sizes: Hop.dims; wrote: payload bytes by column
    nbytes: from its start to its end; where frames are never cut its payload alone, which takes less to know
    """

    offset: int
    nbytes: int
    sizes: tuple[int, ...]
    wrote: dict[str, int]


class Desk:
    """Allocators of one owner's arena, by hop. One thread uses it.

    base: where the arena lies in this process's memory
    late: (hop, offset) of blocks that were let go, by whatever thread; awaited: how many more of each hop may be

    held: hop → (offset, bytes) of blocks that an earlier process left; threads: that may copy
    """

    def __init__(
        self,
        arena: Arena,
        areas: Mapping[str, Area],
        held: Mapping[str, Iterable[tuple[int, int]]] | None = None,
        threads: int = 1,
    ) -> None:
        self.arena, self.threads = arena, threads
        self.base = address(np.frombuffer(arena.view, np.uint8)) if len(arena.view) else 0
        self.regions = {hop: Buddy(*area) for hop, area in areas.items()}
        for hop, blocks in (held or {}).items():
            for offset, nbytes in blocks:
                self.regions[hop].occupy(offset, nbytes)
        self.late: deque[tuple[str, int]] = deque()
        self.awaited = dict.fromkeys(self.regions, 0)

    def take(self, hop: str, nbytes: int) -> int:
        """The offset of a block for at most `nbytes`, whose pages are there. The driver has given leave to write it.

        Raises PayloadError where firings that failed still hold the memory that leave was given for.
        """
        self._free_late()
        region = self.regions[hop]
        if self.awaited[hop] and len(region.live) == region.count:
            gc.collect()  # an exception that refers to itself holds the variables of its hop
            self._free_late()
            if len(region.live) == region.count:
                raise PayloadError(
                    f"hop {hop}: firings that failed or were interrupted hold {self.awaited[hop]} blocks of outputs",
                    "end threads that fill them before the hop ends, or let them fill arrays of their own",
                )
        offset = region.allocate(nbytes)
        self.arena.populate(offset, nbytes)
        return offset

    def trim(self, hop: str, offset: int, nbytes: int) -> None:
        """The block has `nbytes`: the rest of its place is free."""
        self.regions[hop].trim(offset, nbytes)

    def free(self, over: Mapping[str, Iterable[int]]) -> None:
        """Blocks that nobody reads any more. over: hop → offsets"""
        self._free_late()
        for hop, offsets in over.items():
            for offset in offsets:
                self.regions[hop].release(offset)

    def free_once_let_go(self, hop: str, offset: int, block: Any) -> None:
        """Free a block when the last array in it is gone. block: the array that all of them are views of"""
        self.awaited[hop] += 1
        weakref.finalize(block, self.late.append, (hop, offset)).atexit = False

    def _free_late(self) -> None:
        while self.late:
            hop, offset = self.late.popleft()
            self.awaited[hop] -= 1
            self.regions[hop].release(offset)

    def store(
        self,
        hop: Hop,
        values: Mapping[str, Any],
        given: writing.Checked,
        omit: Collection[str] = (),
        inputs: Inputs | None = None,
        at: int = -1,
    ) -> Stored:
        """Write every column that has a place into a block, by `writing.write`. None is left when that raises.

        at: where the block is that the caller took, which then remains the caller's, else -1
        """
        view = self.arena.view
        if not hop.slots:
            return Stored(-1, 0, *writing.write(hop, values, given, view, -1, omit, inputs))
        cut, offset = self.regions[hop.name].levels > 0, at
        if at < 0:
            offset = self.take(hop.name, at_most(hop, given, omit) if cut else hop.block_bytes)
        try:
            sizes, wrote = writing.write(hop, values, given, view, offset, omit, inputs, self.threads)
        except BaseException:
            if at < 0:
                self.free({hop.name: (offset,)})
            raise
        if not cut:
            return Stored(offset, sum(wrote.values()), sizes, wrote)
        nbytes = block_bytes(hop, sizes)
        self.trim(hop.name, offset, nbytes)
        return Stored(offset, nbytes, sizes, wrote)


def block_bytes(hop: Hop, sizes: Iterable[int]) -> int:
    """Bytes of a block with these sizes (Hop.dims)."""
    where = spans(hop, dict(zip(hop.dims, sizes, strict=True))).values()
    return max((span.start + span.nbytes for span in where), default=0)


def column_bytes(hop: Hop, sizes: Iterable[int]) -> dict[str, int]:
    """Payload bytes of each column of such a block."""
    where = spans(hop, dict(zip(hop.dims, sizes, strict=True)))
    return {name: span.nbytes for name, span in where.items()}


def at_most(hop: Hop, given: writing.Checked, omit: Collection[str] = ()) -> int:
    """Bytes that a block of these values takes at the most: exact, but for the forms whose sizes only show when they
    are made.
    """
    opaque = {f"#{column.name}": column for column in hop.written if column.opaque}
    sizes = []
    for dim, bound in zip(hop.dims, hop.bounds, strict=True):
        column = opaque.get(dim)
        size = given.sizes.get(dim, bound) if column is None else _opaque(column, given, bound, omit)
        sizes.append(min(bound, size))  # what is larger is refused when it is written
    return block_bytes(hop, sizes)


def _opaque(column: Column, given: writing.Checked, bound: int, omit: Collection[str]) -> int:
    value = given.raw[column.name]
    if column.kind == "tensors":
        return 0 if column.name in omit else bound
    if not isinstance(column.form, Prefix):
        return len(value)
    rows = given.sizes.get("leaf+1")
    return bound if rows is None else int(value.nbytes) + PLACE * max(0, rows - 2)
