"""A step's column in pieces: what one of several processes takes of it, and what it is made of that each has made.

All is done on columns as they lie: one value a row where they are folded, and bits where they are masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowgraph.errors import PayloadError
from flowgraph.plan.layout import spans
from flowgraph.plan.parts import ROWS, Axis, axis
from flowgraph.plan.plan import Column, Hop
from flowgraph.runtime.messages import Block, Share
from flowgraph.spec.forms import Bits
from flowgraph.spec.types import dtype_of

A = npt.NDArray[Any]
Range = tuple[int, int]


class Piece(NamedTuple):
    """What a process takes of a step's column. stored: as the column's form has it, of a mask its bytes

    shape: of the piece as hops see it; nbytes: that were read for it
    """

    stored: A
    shape: tuple[int, ...]
    nbytes: int


def ranges(share: Share, dim: str, size: int) -> list[Range]:
    """Where the trajectories of a process lie along a dim of the step, neighbours joined. size: of the whole dim

    Raises PayloadError where the dim of the step is not that of its trajectories put together.
    """
    ends = np.cumsum([0, *share.sizes.get(dim, [])])
    if ends[-1] != size:
        raise PayloadError(
            f"a column of the step has {dim}={size}, and its trajectories have {ends[-1]} together",
            f"name the dim otherwise in the hop that gives it, as its rows are not those of the trajectories' {dim}",
        )
    out: list[Range] = []
    for i in share.members:
        start, end = int(ends[i]), int(ends[i + 1])
        if out and out[-1][1] == start:
            start = out.pop()[0]
        out.append((start, end))
    return out


def places(share: Share | None, dim: str) -> npt.NDArray[np.int64] | None:
    """Where along a dim of the step lie the rows that a process takes; None where it takes all, or there is no such."""
    if share is None or dim not in share.sizes:
        return None
    found = ranges(share, dim, sum(share.sizes[dim]))
    return np.concatenate([np.arange(start, end) for start, end in found])


# --- cut ---------------------------------------------------------------------------------------------------------


def piece(share: Share | None, column: Column, stored: A, shape: tuple[int, ...]) -> Piece | None:
    """The piece of one column of a step's block; None where all of it is read. shape: of the whole as hops see it"""
    along = axis(column)
    if share is None or along is None:
        return None
    bits = isinstance(column.form, Bits)
    found = ranges(share, along.dim, (shape if bits else stored.shape)[along.at] - along.bounds)
    count = sum(end - start for start, end in found) + along.bounds
    own = (*shape[: along.at], count, *shape[along.at + 1 :])
    if bits:
        return _bits(stored, found, shape, own, along)
    if along.bounds:
        lengths = np.concatenate([np.diff(stored[a : b + 1]) for a, b in found])
        return Piece(_bounds(lengths), own, sum(b - a + 1 for a, b in found) * stored.itemsize)
    taken = np.concatenate([stored[_at(along, one)] for one in found], along.at)
    return Piece(taken, own, taken.nbytes)


def items(share: Share | None, column: Column, value: Any) -> Any:
    """The same of a list of texts or JSON values, which was read whole."""
    if share is None or not column.shape or column.shape[0] not in ROWS:
        return value
    return [one for start, end in ranges(share, column.shape[0], len(value)) for one in value[start:end]]


def _bits(stored: A, found: list[Range], shape: tuple[int, ...], own: tuple[int, ...], along: Axis) -> Piece:
    """Of a mask as bits, whose rows begin within a byte."""
    lines, each, line = (
        math.prod(shape[: along.at]),
        math.prod(shape[along.at + 1 :]),
        math.prod(shape[along.at :]),
    )
    parts, nbytes = [np.zeros(0, np.uint8)], 0
    for first in range(lines):
        for start, end in ((first * line + a * each, first * line + b * each) for a, b in found):
            span = stored[start // 8 : -(-end // 8)]
            parts.append(np.unpackbits(span)[start % 8 : start % 8 + end - start])
            nbytes += span.nbytes
    return Piece(np.packbits(np.concatenate(parts)), own, nbytes)


def _at(along: Axis, one: Range) -> tuple[slice, ...]:
    """The index of a range along an axis."""
    return (*(slice(None),) * along.at, slice(*one))


def _bounds(lengths: A) -> A:
    out = np.zeros(len(lengths) + 1, lengths.dtype)
    np.cumsum(lengths, out=out[1:])
    return out


# --- join --------------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """What one process has made of its share of a step: a block of the hop, in memory that can be read here."""

    share: Share
    view: memoryview
    block: Block


def whole_sizes(hop: Hop, sizes: Sequence[int], share: Share) -> tuple[int, ...]:
    """The sizes (Hop.dims) of the whole step's block. sizes: of the one that a process made of its share"""
    out = []
    for dim, size in zip(hop.dims, sizes, strict=True):
        name = dim.removesuffix("+1")
        out.append(sum(share.sizes[name]) + (name != dim) if name in ROWS else size)
    return tuple(out)


def join(hop: Hop, made: Sequence[Made]) -> Iterator[tuple[str, A]]:
    """(column, what lies in the whole step's block). made: by every process, in order; what no row has a part of is the
    same for all, and that of the first counts.
    """
    whole = dict(zip(hop.dims, whole_sizes(hop, made[0].block.sizes, made[0].share), strict=True))
    for column in hop.written:
        parts = [_stored(hop, column, one) for one in made]
        along = axis(column)
        if along is None:
            yield column.name, parts[0]
            continue
        size = whole[along.dim + "+1"] - 1 if along.bounds else whole[along.dim]
        found = [ranges(one.share, along.dim, size) for one in made]
        if along.bounds:
            lengths = [np.diff(part) for part in parts]
            yield column.name, _bounds(_scattered(lengths, found, Axis(0, along.dim), size))
        else:
            out = _scattered(parts, found, along, size)
            yield column.name, np.packbits(out.reshape(-1)) if isinstance(column.form, Bits) else out


def _stored(hop: Hop, column: Column, made: Made) -> A:
    """A column of one process's block: bits as booleans, and what is no array as its bytes."""
    sizes = dict(zip(hop.dims, made.block.sizes, strict=True))
    span = spans(hop, sizes)[column.name]
    raw = np.frombuffer(made.view, np.uint8, span.nbytes, made.block.offset + span.start)
    if isinstance(column.form, Bits):
        shape = tuple(sizes[dim] for dim in column.shape)
        return np.unpackbits(raw, count=math.prod(shape)).reshape(shape)
    return raw if column.opaque else raw.view(dtype_of(column.stored)).reshape(span.shape)


def _scattered(parts: Sequence[A], found: Sequence[list[Range]], along: Axis, size: int) -> A:
    """The whole array, in which part i has the ranges found[i] along an axis, one after the other."""
    shape = list(parts[0].shape)
    shape[along.at] = size
    out = np.empty(shape, parts[0].dtype)
    for part, own in zip(parts, found, strict=True):
        done = 0
        for start, end in own:
            out[_at(along, (start, end))] = part[_at(along, (done, done + end - start))]
            done += end - start
    return out
