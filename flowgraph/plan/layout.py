"""Where each column of a block lies: computed from the plan and a few integers, so a descriptor is a few bytes.

A block is one row's record of one hop. Its descriptor is the offset in the owner's arena and the sizes that
`Hop.dims` names; writer, reader and the audit compute the same spans from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import msgspec

from flowgraph.plan.plan import Column, Hop, TensorSlot
from flowgraph.spec.forms import Bits
from flowgraph.spec.types import dtype_of


class Span(msgspec.Struct, frozen=True):
    """One column inside a block: first byte, number of bytes, and the array's shape."""

    start: int
    nbytes: int
    shape: tuple[int, ...] = ()


def aligned(n: int, to: int = 8) -> int:
    return -(-n // to) * to


def spans(hop: Hop, sizes: Mapping[str, int]) -> dict[str, Span]:
    """Spans of the written columns, in order, each aligned to 8 bytes. `sizes`: Hop.dims → integers.

    The shape is that of the array as it lies there: flat bytes for bits.
    """
    out: dict[str, Span] = {}
    at = 0
    for column in hop.written:
        span = _span(column, sizes, at)
        out[column.name] = span
        at = aligned(span.start + span.nbytes)
    return out


def _span(column: Column, sizes: Mapping[str, int], at: int) -> Span:
    if not column.opaque:
        shape = tuple(sizes[d] for d in column.stored_shape)
        count = math.prod(shape)
        if isinstance(column.form, Bits):
            return Span(at, -(-count // 8), (-(-count // 8),))
        return Span(at, count * dtype_of(column.stored).itemsize, shape)
    if column.kind == "tensors":
        at = aligned(at, 64)
    return Span(at, sizes[f"#{column.name}"])


def lengths(hop: Hop, sizes: Iterable[int]) -> dict[str, int]:
    """The named lengths of a row, by what a hop recorded: `leaf` also from `leaf+1`, which bounds of ranges have."""
    found = list(sizes)
    assert len(found) == len(hop.dims), (hop.name, found)
    return {name: found[at] - more for name, at, more in _named(hop.dims)}


@functools.lru_cache(maxsize=1024)
def _named(dims: tuple[str, ...]) -> tuple[tuple[str, int, int], ...]:
    """The names among dims, each with where its size stands and how much more than it that is."""
    out: dict[str, tuple[str, int, int]] = {}
    for at, dim in enumerate(dims):
        name, plus, one = dim.partition("+")
        if dim.isidentifier():
            out[dim] = dim, at, 0
        elif plus and name.isidentifier() and one.isdigit():
            out.setdefault(name, (name, at, int(one)))
    return tuple(out.values())


def tensor_bytes(tensor: TensorSlot) -> int:
    """Bytes of one tensor of a set, padded to 64 so that each starts on a cache line."""
    size = dtype_of(tensor.dtype).itemsize
    for n in tensor.shape:
        size *= n
    return aligned(size, 64)
