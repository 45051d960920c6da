"""Payload out of blocks: a hop's inputs are views of what others wrote, gathered over rows, in the form that hops see.

What is read must agree on every dim that two ports share.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flowgraph.errors import PayloadError
from flowgraph.plan.layout import spans
from flowgraph.plan.plan import Column, Hop, Plan, Read
from flowgraph.plan.taken import takes
from flowgraph.runtime import wire
from flowgraph.runtime.messages import Block
from flowgraph.spec.config import import_object
from flowgraph.spec.dims import parse
from flowgraph.spec.forms import Bits, Prefix
from flowgraph.spec.types import dtype_of


class Inputs(NamedTuple):
    """What a hop reads: values and bytes by port, bytes by the owner whose memory they lie in, every dim's size.

    joined: ports whose bytes were copied out of their blocks: joined of several rows, or decoded
    """

    values: dict[str, Any]
    nbytes: dict[str, int]
    homes: dict[str, int]
    sizes: dict[str, int]
    joined: tuple[str, ...] = ()


Blocks = Mapping[str, Sequence[Block]]


class Reader:
    """Reads the columns of one firing, of all hops that fire together.

    read: column and way of reading it → value, for a hop of the group that reads it in the same way
    """

    def __init__(self, plan: Plan, views: Mapping[str, memoryview]) -> None:
        self.plan, self.views = plan, views
        self.read: dict[tuple[Any, ...], Any] = {}

    def inputs(self, hop: Hop, blocks: Blocks, leaves: Sequence[int], handed: Mapping[str, Any]) -> Inputs:
        """A hop's column inputs. Arrays are read-only, and not copied where one row is read as it lies.

        handed: "hop.column" → value, of hops of the same group
        """
        values: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        joined: list[str] = []
        count = _Count(hop.reads)
        for one in hop.reads:
            column = self.plan.hops[one.producer].column(one.column)
            count.port(one.port)
            name = f"{one.producer}.{one.column}"
            if not one.handed:
                value = self.read[_way(one)] = self.value(one, blocks, leaves, count)
            elif name in handed:
                part = handed[name]
                value = _gather(
                    one, column, [part if column.kind == "array" else _decoded(column, part)], leaves
                )
            else:
                value = self.read[_way(one)]
            values[one.port] = value
            if count.ports[one.port] and not (column.kind == "tensors" or _lies(value)):
                joined.append(one.port)
            if column.kind == "array" and one.gather in ("same", "concat", "offsets"):
                for dim, size in zip(column.shape, value.shape, strict=True):
                    if sizes.setdefault(dim, size) != size:
                        raise PayloadError(
                            f"hop {hop.name} reads {one.port} with {dim}={size}, "
                            f"and another port with {dim}={sizes[dim]}",
                            f"make {one.producer} agree with the other ports' writers",
                        )
        agree(hop.name, sizes)
        return Inputs(values, count.ports, count.homes, sizes, tuple(joined))

    def value(self, one: Read, blocks: Blocks, leaves: Sequence[int], count: _Count, depth: int = 0) -> Any:
        """One column, gathered over the rows of `blocks`."""
        producer = self.plan.hops[one.producer]
        column = producer.column(one.column)
        parts: list[Any] = []
        before: dict[int, int] = {}
        for i in range(len(blocks[one.producer]) if not one.derive else 1 if one.same_rows else len(leaves)):
            first = before.setdefault(blocks[one.producer][i].offset, i) if one.once else i
            if not depth:
                count.part(again=first < i)
            # What is no array may be changed by a hop, so it is decoded anew; its bytes are there once all the same.
            if first < i and column.kind == "array":
                part = parts[first]
            elif one.derive:
                needs = self._needs(one, blocks, leaves, i, count, depth)
                part = np.asarray(_function(one.derive)(*needs.values()))
            else:
                part = self._stored(one, producer, column, blocks, leaves, i, count, depth)
            if isinstance(part, np.ndarray):
                part.flags.writeable = False
            parts.append(part)
        return _gather(one, column, parts, leaves)

    def _stored(
        self, one: Read, producer: Hop, column: Column, blocks: Blocks, leaves: Sequence[int], i: int,
        count: _Count, depth: int,
    ) -> Any:  # fmt: skip
        """One row's value, out of its block."""
        block = blocks[one.producer][i]
        sizes = dict(zip(producer.dims, block.sizes, strict=True))
        span = spans(producer, sizes)[column.name]
        view, start = self.views[producer.home], block.offset + span.start
        count.read(one, i, depth, producer.home, span.nbytes)
        if column.kind == "array":
            raw = isinstance(column.form, Bits | Prefix)
            dtype = np.dtype(np.uint8) if raw else dtype_of(column.stored)
            stored = np.frombuffer(view, dtype, span.nbytes // dtype.itemsize, start)
            if not raw:
                stored = stored.reshape(span.shape)
            if one.as_it_lies(column):
                return stored
            shape = tuple(sizes[d] for d in column.shape)
            needs = self._needs(one, blocks, leaves, i, count, depth)
            return wire.unpack(column, stored, shape, needs, one.narrow)
        if column.kind == "tensors":
            from flowgraph.runtime.tensors import read_tensors

            return read_tensors(column.tensors, view, start)
        return _decoded(column, view[start : start + span.nbytes])

    def _needs(
        self, one: Read, blocks: Blocks, leaves: Sequence[int], i: int, count: _Count, depth: int
    ) -> dict[str, Any]:
        """What the writer had when it made part i: on its own row when many of its rows are gathered."""
        if not one.same_rows:
            blocks = {name: (row[i],) for name, row in blocks.items() if len(row) == len(leaves)}
            leaves = (leaves[i],)
        return {need.port: self.value(need, blocks, leaves, count, depth + 1) for need in one.needs}


class _Count:
    """Bytes by port and by the owner in whose memory they lie; what several ports take is counted for one of them."""

    def __init__(self, reads: Sequence[Read]) -> None:
        self.ports: dict[str, int] = {}
        self.homes: dict[str, int] = {}
        self.claims = {(n.producer, n.column): port for port, found in takes(reads).items() for n in found}

    def port(self, name: str) -> None:
        self.at = name
        self.ports[name] = 0

    def part(self, again: bool) -> None:
        """The next row of the port itself, or one that was read before: nothing has been read for its form yet."""
        self.again = again
        self.seen: set[tuple[str, str, int]] = set()

    def read(self, one: Read, i: int, depth: int, home: str, nbytes: int) -> None:
        key = one.producer, one.column, i
        if self.again or self.claims.get(key[:2]) != self.at or (depth and key in self.seen):
            return
        self.seen.add(key)
        self.ports[self.at] += nbytes
        self.homes[home] = self.homes.get(home, 0) + nbytes


def _lies(value: Any) -> bool:
    """Whether it is an array in somebody else's memory: a view of a block."""
    while isinstance(value, np.ndarray):
        value = value.base
    return isinstance(value, memoryview)


def met_driver(hop: Hop, homes: Mapping[str, int]) -> int:
    """Of the bytes that a hop read, by the owner in whose memory they lie: those between the driver and another."""
    return sum(n for home, n in homes.items() if (home == "driver") != (hop.owner == "driver"))


def kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, which outlive their blocks: a fold may keep in its state what it reads."""
    return {
        port: _copied(value) if isinstance(value, np.ndarray) else value for port, value in values.items()
    }


def _copied(value: Any) -> Any:
    value = value.copy()
    value.flags.writeable = False
    return value


def _decoded(column: Column, data: bytes | memoryview) -> Any:
    """A value that is no array; a new one each time, because a hop may change it."""
    return (msgspec.json if column.kind == "json" else msgspec.msgpack).decode(data)


@functools.lru_cache(maxsize=256)
def _function(path: str) -> Any:
    return import_object(path)


def _way(one: Read) -> tuple[Any, ...]:
    return one.producer, one.column, one.gather, one.narrow


def _gather(one: Read, column: Column, parts: list[Any], leaves: Sequence[int]) -> Any:
    if one.gather == "same":
        return parts[0]
    if one.gather == "repeat":
        parts = [part for part, n in zip(parts, leaves, strict=True) for _ in range(n)]
    if column.kind != "array":
        return [item for part in parts for item in part] if one.gather == "concat" else parts
    if one.gather in ("each", "repeat"):
        return np.array(parts, parts[0].dtype if parts else dtype_of(column.dtype))
    if one.gather == "offsets":
        return join_offsets(parts)
    return np.concatenate(parts)


def join_offsets(parts: Sequence[Any]) -> Any:
    """Bounds of ranges, each from 0, joined: [0, 3] and [0, 2, 5] → [0, 3, 5, 8]."""
    lengths = [np.diff(part) for part in parts]
    joined = np.zeros(1 + sum(map(len, lengths)), np.int64)
    np.cumsum(np.concatenate(lengths), out=joined[1:])
    dtype = parts[0].dtype
    if joined[-1] > np.iinfo(dtype).max:
        raise PayloadError(
            f"bounds of {len(parts)} rows end at {joined[-1]} when they are joined, which is too large for {dtype}",
            "give them as int64 in the hop that writes them",
        )
    return joined.astype(dtype)


def agree(who: str, sizes: Mapping[str, int]) -> None:
    """A composite dim such as leaf+1 equals what its names say, when they are all bound."""
    for dim, size in sizes.items():
        if dim.startswith("#") or dim.isidentifier() or dim.isdigit():
            continue
        expr = parse(dim)
        if expr.names <= set(sizes) and expr.at({n: sizes[n] for n in expr.names}) != size:
            text = f"hop {who}: {dim} is {size} with {_show({n: sizes[n] for n in sorted(expr.names)})}"
            raise PayloadError(text, "make the lengths agree in the hop")


def _show(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sizes.items())
