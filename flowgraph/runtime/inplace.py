"""A hop's outputs written where they will be read: a block is taken when the hop asks for it, before it returns."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowgraph.errors import PayloadError
from flowgraph.plan.copies import placed
from flowgraph.plan.layout import spans
from flowgraph.plan.plan import Hop
from flowgraph.runtime.copying import address, is_at
from flowgraph.runtime.desk import Desk
from flowgraph.runtime.writing import Checked
from flowgraph.spec.outputs import Dtypes, Shape, offered
from flowgraph.spec.types import dtype_of


class Places(NamedTuple):
    """Where arrays lie in a block: its bytes at the most, and the first byte of each array that has a place."""

    nbytes: int
    starts: dict[str, int]


class Offer:
    """Of one firing of a hop, within which `flowgraph.outputs` asks for a block. When that raises, the block is free
    again as soon as nothing holds memory of it: a thread that the hop left behind may still write there.

    offset: of that block, -1 while there is none; shapes: that were asked for; arrays: those in the block
    written: names of the outputs that lie there, and are not copied
    """

    def __init__(self, desk: Desk, hop: Hop, function: Callable[..., Any]) -> None:
        self.desk, self.hop, self.function = desk, hop, function
        self.offset = -1
        self.shapes: Mapping[str, Shape] = {}
        self.arrays: dict[str, Any] = {}
        self.written: tuple[str, ...] = ()

    def __enter__(self) -> Offer:
        self.token, self.thread = offered.set(self), threading.get_ident()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        offered.reset(self.token)
        if kind is not None and self.offset >= 0:
            self.desk.free_once_let_go(self.hop.name, self.offset, self.block)
            self.offset = -1
            del self.block, self.arrays

    def __call__(
        self, of: Callable[..., Any], shapes: Mapping[str, Shape], dtypes: Dtypes
    ) -> Mapping[str, Any]:
        """Arrays of these shapes in the block, at least as wide; none for another hop's, the second time, or in another
        thread: blocks are taken and freed by one thread.
        """
        if self.shapes or of is not self.function or threading.get_ident() != self.thread:
            return {}
        self.shapes = shapes
        places = places_of(self.hop, shapes, dtypes)
        if not places.starts:
            return {}
        view = self.desk.arena.view
        self.offset = self.desk.take(self.hop.name, places.nbytes)
        self.block = np.frombuffer(view, np.uint8, places.nbytes, self.offset)
        for name, start in places.starts.items():
            dtype = dtype_of(self.hop.column(name).stored)
            bytes = self.block[start : start + math.prod(shapes[name]) * dtype.itemsize]
            self.arrays[name] = bytes.view(dtype).reshape(shapes[name])  # it holds self.block
        return self.arrays

    def accept(self, given: Checked) -> Checked:
        """What the hop gave, if it can be written into the block; else the same in memory of its own, and no block.

        Raises PayloadError for an array that an earlier firing was given: its memory may be another row's by now.
        """
        for name, value in given.raw.items():
            if self._was_given_before(value):
                text = f"hop {self.hop.name}: {name} lies in memory of `outputs` that an earlier firing was given"
                raise PayloadError(text, "keep a copy of what is returned again: array.copy()")
        if self.offset < 0:
            return given
        if all(self._stands(name, value) for name, value in given.raw.items()):
            self.written = tuple(name for name, value in given.raw.items() if self._within(value))
            return given
        raw = {name: value.copy() if self._within(value) else value for name, value in given.raw.items()}
        self.give_back()
        return Checked(raw, given.sizes)

    def _stands(self, name: str, value: Any) -> bool:
        """Whether it is as large as was asked, and writing it spoils no other value: it lies outside, or is there."""
        if name in self.shapes and value.shape != self.shapes[name]:
            return False
        return not self._within(value) or (name in self.arrays and is_at(value, self.arrays[name]))

    def _was_given_before(self, value: Any) -> bool:
        """In the owner's own memory, outside the block, and no input: those can't be written."""
        if not isinstance(value, np.ndarray) or not value.size or not value.flags.writeable:
            return False
        offset = address(value) - self.desk.base
        return 0 <= offset < len(self.desk.arena.view) and (self.offset < 0 or not self._within(value))

    def _within(self, value: Any) -> bool:
        return isinstance(value, np.ndarray) and np.may_share_memory(value, self.block)

    def give_back(self) -> None:
        """The hop has returned, so that what it was given is no longer its own."""
        self.desk.free({self.hop.name: (self.offset,)})
        self.offset = -1


def places_of(hop: Hop, shapes: Mapping[str, Shape], dtypes: Dtypes) -> Places:
    """The place of every array that a hop may write there itself, in the dtype in which it is stored."""
    sizes: dict[str, int] = {}
    for column in hop.columns:
        if column.name in shapes:
            sizes |= dict(zip(column.shape, shapes[column.name], strict=True))
    bounds = dict(zip(hop.dims, hop.bounds, strict=True))
    if not hop.slots or any(sizes.get(dim, 0) > bound for dim, bound in bounds.items()):
        return Places(0, {})  # nobody reads it, or it is refused when it is written
    where = spans(hop, {**bounds, **sizes})
    fit = [column.name for column in placed(hop) if np.can_cast(dtypes[column.name], dtype_of(column.stored))]
    starts = {name: where[name].start for name in fit}
    return Places(max((span.start + span.nbytes for span in where.values()), default=0), starts)
