"""Payload in and out of blocks: a hop's outputs are written into its lease, its inputs are views of others' blocks.

Both sides check: what is written must be of the port's exact dtype and rank and fit its bound; what is read
must agree on every dim that two ports share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flowgraph.errors import PayloadError
from flowgraph.plan.layout import Span, spans, tensor_bytes
from flowgraph.plan.plan import Column, Hop, Plan, Read
from flowgraph.runtime.messages import Block, Fire
from flowgraph.spec.dims import parse
from flowgraph.spec.types import dtype_of


class Inputs(NamedTuple):
    """What a hop reads: values and bytes by port, and the size of every dim."""

    values: dict[str, Any]
    nbytes: dict[str, int]
    sizes: dict[str, int]


def write(
    hop: Hop,
    values: Mapping[str, Any],
    view: memoryview,
    lease: int,
    omit: Sequence[str] = (),
    known: Mapping[str, int] | None = None,
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Write every column that somebody reads into the block at `lease`. Returns sizes (Hop.dims) and bytes by column.

    known: sizes of dims in what the hop read, which its outputs must have too

    Raises PayloadError naming hop, column, what it is and what it should be.
    """
    raw: dict[str, Any] = {}
    sizes = dict(known or {})
    for column in hop.written:
        omitted = column.name in omit
        value: Any = b"" if omitted else _raw(hop, column, values[column.name])
        raw[column.name] = value
        if column.kind == "array":
            _bind(hop, column, value.shape, sizes)
        else:
            size = (
                len(value) if column.kind != "tensors" or omitted else sum(map(tensor_bytes, column.tensors))
            )
            sizes[f"#{column.name}"] = size
            if column.shape:
                _bind(hop, column, (len(values[column.name]),), sizes)
    _agree(hop.name, sizes)
    _within(hop, sizes)
    where = spans(hop, sizes)
    for name, value in raw.items():
        _store(hop.column(name), value, view, lease, where[name])
    return tuple(sizes[d] for d in hop.dims), {name: s.nbytes for name, s in where.items()}


def _raw(hop: Hop, column: Column, value: Any) -> Any:
    if column.kind == "array":
        array = np.asarray(value)
        if array.dtype != dtype_of(column.dtype) or array.ndim != len(column.shape):
            got = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
            raise PayloadError(
                f"hop {hop.name} gave {column.name} as {got}, and its port is {column.type}",
                "convert it in the hop",
            )
        return array
    if column.kind == "tensors":
        return value
    if column.shape and not isinstance(value, list | tuple):
        text = f"hop {hop.name} gave {column.name} as {type(value).__name__}, and its port is {column.type}"
        raise PayloadError(text, "give a list, one value a row")
    if column.kind == "json":
        return msgspec.json.encode(value)
    if odd := [one for one in (value if column.shape else [value]) if not isinstance(one, str)]:
        text = f"hop {hop.name} gave {column.name} as {type(odd[0]).__name__}, and its port is {column.type}"
        raise PayloadError(text, "give text, or declare the port as Json")
    return msgspec.msgpack.encode(value)  # as long as the text is, where JSON escapes it


def _bind(hop: Hop, column: Column, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    for dim, size in zip(column.shape, shape, strict=True):
        if (dim.isdigit() and int(dim) != size) or sizes.setdefault(dim, size) != size:
            wanted = int(dim) if dim.isdigit() else sizes[dim]
            raise PayloadError(
                f"hop {hop.name}: {dim} is {size} in {column.name} and {wanted} elsewhere",
                "make the lengths agree in the hop",
            )


def _agree(who: str, sizes: Mapping[str, int]) -> None:
    """A composite dim such as leaf+1 equals what its names say, when they are all bound."""
    for dim, size in sizes.items():
        if dim.startswith("#") or dim.isidentifier() or dim.isdigit():
            continue
        expr = parse(dim)
        if expr.names <= set(sizes) and expr.at({n: sizes[n] for n in expr.names}) != size:
            text = f"hop {who}: {dim} is {size} with {_show({n: sizes[n] for n in sorted(expr.names)})}"
            raise PayloadError(text, "make the lengths agree in the hop")


def _within(hop: Hop, sizes: Mapping[str, int]) -> None:
    """Every size is within the bound that memory was allocated for."""
    for dim, bound in zip(hop.dims, hop.bounds, strict=True):
        if sizes[dim] > bound:
            if dim.startswith("#"):
                text = f"hop {hop.name} gave {dim[1:]} of {sizes[dim]} bytes, and its bound is {bound}"
                raise PayloadError(text, f"raise max in the annotation of {dim[1:]} in {hop.place}")
            text = f"hop {hop.name} gave {dim}={sizes[dim]}, and the graph's bound is {bound}"
            raise PayloadError(
                text, f"raise the max of {dim} under dims: (of prompt and response for token), or give less"
            )


def _show(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sizes.items())


def _store(column: Column, value: Any, view: memoryview, lease: int, span: Span) -> None:
    start = lease + span.start
    if column.kind == "array":
        target = np.frombuffer(view, value.dtype, value.size, start).reshape(value.shape)
        np.copyto(target, value)
    elif column.kind == "tensors":
        if span.nbytes:
            from flowgraph.runtime.tensors import write_tensors

            write_tensors(column.tensors, value, view, start)
    else:
        view[start : start + span.nbytes] = value


def read(plan: Plan, hop: Hop, fire: Fire, views: Mapping[str, memoryview]) -> Inputs:
    """A hop's column inputs. Arrays are read-only, and not copied where one row is read."""
    values: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for one in hop.reads:
        producer = plan.hops[one.producer]
        column = producer.column(one.column)
        parts, nbytes[one.port] = _parts(producer, column, fire.blocks[one.producer], views[producer.owner])
        values[one.port] = value = _gather(one, column, parts, fire.leaves)
        if column.kind == "array" and one.gather in ("same", "concat", "offsets"):
            for dim, size in zip(column.shape, value.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise PayloadError(
                        f"hop {hop.name} reads {one.port} with {dim}={size}, and another port with {dim}={sizes[dim]}",
                        f"make {one.producer} agree with the other ports' writers",
                    )
    _agree(hop.name, sizes)
    return Inputs(values, nbytes, sizes)


def _parts(producer: Hop, column: Column, blocks: Sequence[Block], view: memoryview) -> tuple[list[Any], int]:
    parts: list[Any] = []
    total = 0
    for block in blocks:
        span = spans(producer, dict(zip(producer.dims, block.sizes, strict=True)))[column.name]
        start = block.offset + span.start
        total += span.nbytes
        if column.kind == "array":
            count = int(np.prod(span.shape, dtype=np.int64))
            array = np.frombuffer(view, dtype_of(column.dtype), count, start).reshape(span.shape)
            array.flags.writeable = False
            parts.append(array)
        elif column.kind == "tensors":
            from flowgraph.runtime.tensors import read_tensors

            parts.append(read_tensors(column.tensors, view, start))
        else:
            decode = msgspec.json.decode if column.kind == "json" else msgspec.msgpack.decode
            parts.append(decode(view[start : start + span.nbytes]))
    return parts, total


def _gather(one: Read, column: Column, parts: list[Any], leaves: Sequence[int]) -> Any:
    if one.gather == "same":
        return parts[0]
    if one.gather == "repeat":
        parts = [part for part, n in zip(parts, leaves, strict=True) for _ in range(n)]
    if column.kind != "array":
        return [item for part in parts for item in part] if one.gather == "concat" else parts
    if one.gather in ("each", "repeat"):
        return np.array(parts, dtype_of(column.dtype))
    if one.gather == "offsets":
        return join_offsets(parts)
    return np.concatenate(parts)


def join_offsets(parts: Sequence[Any]) -> Any:
    """Bounds of ranges, each from 0, joined: [0, 3] and [0, 2, 5] → [0, 3, 5, 8]."""
    lengths = [np.diff(part) for part in parts]
    joined = np.zeros(1 + sum(map(len, lengths)), parts[0].dtype if parts else np.int64)
    np.cumsum(np.concatenate(lengths), out=joined[1:])
    return joined
