"""A hop's outputs written where they will be read: a block is taken when the hop asks for it, before it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowgraph.plan.layout import spans
from flowgraph.plan.plan import Column, Hop
from flowgraph.runtime.copying import is_at
from flowgraph.runtime.desk import Desk
from flowgraph.runtime.writing import Checked
from flowgraph.spec.outputs import Shape, offered
from flowgraph.spec.types import dtype_of


class Places(NamedTuple):
    """Where arrays lie in a block: its bytes at the most, and the first byte of each array that has a place."""

    nbytes: int
    starts: dict[str, int]


class Offer:
    """Of one firing of a hop, within which `flowgraph.outputs` asks for a block. It is free again when that raises.

    desk: whose block that is, None where there is none to give
    offset: of that block, -1 while there is none; shapes: that were asked for; arrays: those in the block
    """

    def __init__(self, desk: Desk | None, hop: Hop, function: Callable[..., Any]) -> None:
        self.desk, self.hop, self.function = desk, hop, function
        self.offset = -1
        self.shapes: Mapping[str, Shape] = {}
        self.arrays: dict[str, Any] = {}

    def __enter__(self) -> Offer:
        self.token = offered.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        offered.reset(self.token)
        if kind is not None:
            self.give_back()

    def __call__(self, of: Callable[..., Any], shapes: Mapping[str, Shape]) -> Mapping[str, Any]:
        """Arrays of these shapes in the block; none for another hop's, or the second time."""
        if self.shapes or of is not self.function or self.desk is None:
            return {}
        self.shapes = shapes
        places = places_of(self.hop, shapes)
        if not places.starts:
            return {}
        view = self.desk.arena.view
        self.offset = self.desk.take(self.hop.name, places.nbytes)
        self.block = np.frombuffer(view, np.uint8, places.nbytes, self.offset)
        for name, start in places.starts.items():
            dtype, count = dtype_of(self.hop.column(name).dtype), math.prod(shapes[name])
            self.arrays[name] = np.frombuffer(view, dtype, count, self.offset + start).reshape(shapes[name])
        return self.arrays

    def accept(self, given: Checked) -> Checked:
        """What the hop gave, if it can be written into the block; else the same in memory of its own, and no block."""
        if self.offset < 0 or all(self._stands(name, value) for name, value in given.raw.items()):
            return given
        raw = {name: value.copy() if self._within(value) else value for name, value in given.raw.items()}
        self.give_back()
        return Checked(raw, given.sizes)

    def _stands(self, name: str, value: Any) -> bool:
        """Whether it is as large as was asked, and writing it spoils no other value: it lies outside, or is there."""
        if name in self.shapes and value.shape != self.shapes[name]:
            return False
        return not self._within(value) or (name in self.arrays and is_at(value, self.arrays[name]))

    def _within(self, value: Any) -> bool:
        return isinstance(value, np.ndarray) and np.may_share_memory(value, self.block)

    def give_back(self) -> None:
        if self.offset >= 0 and self.desk is not None:
            self.desk.free({self.hop.name: (self.offset,)})
        self.offset = -1


def places_of(hop: Hop, shapes: Mapping[str, Shape]) -> Places:
    """The place of every array that crosses as it is, as far as the sizes of what lies before it are known."""
    sizes: dict[str, int] = {}
    for column in hop.columns:
        if column.name in shapes:
            sizes |= dict(zip(column.shape, shapes[column.name], strict=True))
    bounds = dict(zip(hop.dims, hop.bounds, strict=True))
    if not hop.slots or any(sizes.get(dim, 0) > bound for dim, bound in bounds.items()):
        return Places(0, {})  # nobody reads it, or it is refused when it is written
    where = spans(hop, {**bounds, **sizes})
    starts = {}
    for column in hop.written:
        if column.opaque or not bounds.keys() & set(column.stored_shape) <= sizes.keys():
            break
        if _as_it_is(column) and column.name in shapes:
            starts[column.name] = where[column.name].start
    return Places(max((span.start + span.nbytes for span in where.values()), default=0), starts)


def _as_it_is(column: Column) -> bool:
    return column.form is None and column.stored == column.dtype
