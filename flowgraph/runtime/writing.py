"""Payload into blocks: a hop's outputs are checked, put into the form that crosses, and written into its lease.

What is written must be of the port's exact dtype and rank and fit its bound. Integers that are promised to be below a
bound may come in any dtype that the port's holds: who has them in a byte need not make more of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowgraph.errors import PayloadError
from flowgraph.plan.layout import spans, tensor_bytes
from flowgraph.plan.plan import Column, Hop
from flowgraph.runtime import wire
from flowgraph.runtime.copying import Copy, copy
from flowgraph.runtime.encoding import encoded, too_long
from flowgraph.runtime.reading import Inputs, agree
from flowgraph.spec.forms import Bits, Range
from flowgraph.spec.types import dtype_of


class Checked(NamedTuple):
    """Outputs of one hop as what would be stored of them, by column, and the sizes that they bind."""

    raw: dict[str, Any]
    sizes: dict[str, int]


def checked(
    hop: Hop,
    columns: Iterable[Column],
    values: Mapping[str, Any],
    known: Mapping[str, int] | None = None,
) -> Checked:
    """These outputs, checked against their ports.

    known: sizes of dims in what the hop read, which its outputs must have too
    Raises PayloadError naming hop, column, what it is and what it should be; PromiseBroken for integers out of range.
    """
    raw: dict[str, Any] = {}
    sizes = dict(known or {})
    for column in columns:
        raw[column.name] = value = _raw(hop, column, values[column.name])
        if column.kind == "array":
            wire.check_range(hop.name, column, value)
            _bind(hop, column, value.shape, sizes)
        elif column.shape:
            _bind(hop, column, (len(values[column.name]),), sizes)
    agree(hop.name, sizes)
    return Checked(raw, sizes)


def write(
    hop: Hop,
    values: Mapping[str, Any],
    given: Checked,
    view: memoryview,
    lease: int,
    omit: Collection[str] = (),
    inputs: Inputs | None = None,
    threads: int = 1,
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Write every column that has a place into the block at `lease`. Returns sizes (Hop.dims) and bytes by column.

    given: the values that somebody gets, checked; lease: any, where no column has a place
    inputs: what the hop read; threads: that may copy
    Raises PayloadError, and PromiseBroken where a promise shows to be broken.
    """
    raw, sizes = dict(given.raw), dict(given.sizes)
    env = {**(inputs.values if inputs else {}), **values}
    for column in hop.written:
        if column.kind == "tensors":
            raw[column.name] = {} if column.name in omit else raw[column.name]
            sizes[f"#{column.name}"] = sum(map(tensor_bytes, column.tensors)) if raw[column.name] else 0
        elif column.kind == "array":
            raw[column.name] = stored = wire.pack(hop.name, column, raw[column.name], env)
            if column.opaque:
                sizes[f"#{column.name}"] = stored.nbytes
            elif not isinstance(column.form, Bits):
                sizes |= dict(zip(column.stored_shape, stored.shape, strict=True))
        else:
            sizes[f"#{column.name}"] = len(raw[column.name])
    _within(hop, sizes)
    where = spans(hop, sizes)
    copies = []
    for name, span in where.items():
        if hop.column(name).kind == "array":
            stored, start = raw[name], lease + span.start
            target = np.frombuffer(view, stored.dtype, stored.size, start).reshape(stored.shape)
            copies.append(Copy(target, stored))
        else:
            _store(hop.column(name), raw[name], view, lease + span.start, span.nbytes)
    copy(copies, threads)
    return tuple(sizes[d] for d in hop.dims), {name: s.nbytes for name, s in where.items()}


def verify(hop: Hop, values: Mapping[str, Any], inputs: Inputs | None = None) -> None:
    """Verify mode: every output is of its port's type, read or not, and what is promised of it holds.

    Raises PayloadError and PromiseBroken.
    """
    raw, _ = checked(hop, hop.columns, values, inputs.sizes if inputs else None)
    arrays = {column.name: raw[column.name] for column in hop.columns if column.kind == "array"}
    env = {**(inputs.values if inputs else {}), **values, **arrays}
    for name, value in arrays.items():
        wire.verify(hop.name, hop.column(name), value, env)


def hand_on(hop: Hop, given: Checked) -> dict[str, Any]:
    """ "hop.column" → value for hops of the same group: checked, read-only, and laid out as it would be after crossing,
    because what a hop computes may depend on the order in memory. What is no array stays encoded: each decodes its own.
    """
    out: dict[str, Any] = {}
    for column in (c for c in hop.checked if c.kind != "tensors"):
        value = given.raw[column.name]
        if column.kind == "array":
            value = np.asarray(value, dtype_of(column.dtype), order="C").view()
            value.flags.writeable = False
        out[f"{hop.name}.{column.name}"] = value
    return out


def _raw(hop: Hop, column: Column, value: Any) -> Any:
    if column.kind == "array":
        array = np.asarray(value)
        if not _is_dtype(column, array.dtype) or array.ndim != len(column.shape):
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
    return encoded(hop, column, value)


def _is_dtype(column: Column, given: np.dtype[Any]) -> bool:
    wanted = dtype_of(column.dtype)
    if given == wanted:
        return True
    below = any(isinstance(one, Range) for one in column.promises)
    return below and given.kind in "iu" and np.can_cast(given, wanted)


def _bind(hop: Hop, column: Column, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    for dim, size in zip(column.shape, shape, strict=True):
        if (dim.isdigit() and int(dim) != size) or sizes.setdefault(dim, size) != size:
            wanted = int(dim) if dim.isdigit() else sizes[dim]
            raise PayloadError(
                f"hop {hop.name}: {dim} is {size} in {column.name} and {wanted} elsewhere",
                "make the lengths agree in the hop",
            )


def _within(hop: Hop, sizes: Mapping[str, int]) -> None:
    """Every size is within the bound that memory was allocated for."""
    for dim, bound in zip(hop.dims, hop.bounds, strict=True):
        if sizes[dim] > bound:
            if dim.startswith("#"):
                raise too_long(hop, dim[1:], sizes[dim], bound)
            text = f"hop {hop.name} gave {dim}={sizes[dim]}, and the graph's bound is {bound}"
            raise PayloadError(
                text, f"raise the max of {dim} under dims: (of prompt and response for token), or give less"
            )


def _store(column: Column, value: Any, view: memoryview, start: int, nbytes: int) -> None:
    """What is no array."""
    if column.kind != "tensors":
        view[start : start + nbytes] = value
    elif nbytes:
        from flowgraph.runtime.tensors import write_tensors

        write_tensors(column.tensors, value, view, start)
