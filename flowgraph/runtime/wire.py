"""Forms of columns and their inverses: what a hop gives becomes what lies in a block, and back, bit for bit.

`env` holds what the writer had: its inputs and outputs by port. Every pair is pure numpy over one row's value.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flowgraph.errors import PromiseBroken
from flowgraph.plan.plan import Column
from flowgraph.spec.config import import_object
from flowgraph.spec.forms import PLACE, Bits, Derived, PerRow, Prefix, Range
from flowgraph.spec.types import dtype_of

A = npt.NDArray[Any]
SIGNED_ZERO = "-0.0 and 0.0 differ in a bit: write np.where(mask, x, 0) where it is x * mask"


def pack(who: str, column: Column, value: A, env: Mapping[str, Any]) -> A:
    """The array that lies in a block: for a Prefix its raw bytes. Integers are below their bound, see `check_range`,
    and may have come in a narrower dtype.

    who: the hop, for messages. Raises PromiseBroken when the bounds that a form needs do not part the value into rows.
    """
    form = column.form
    if isinstance(form, PerRow | Prefix):
        _check_bounds(who, column, form.bounds, value, env)
    if isinstance(form, PerRow):
        value = _first(form, value, env)
    value = value.astype(dtype_of(column.stored), copy=False)
    if isinstance(form, Bits):
        return np.packbits(value.reshape(-1))
    return _prefixed(form, value, env) if isinstance(form, Prefix) else value


def unpack(
    column: Column, stored: A, shape: tuple[int, ...], env: Mapping[str, Any], narrow: bool = False
) -> A:
    """What the hop gave. shape: of the value, where the form alone does not say it.

    narrow: integers stay in the dtype in which they are stored
    """
    form = column.form
    if isinstance(form, Bits):
        count = int(np.prod(shape, dtype=np.int64))
        return np.unpackbits(stored, count=count).view(np.bool_).reshape(shape)
    if isinstance(form, Prefix):
        stored = _expanded(form, column, stored, env)
    value = stored if narrow else stored.astype(dtype_of(column.dtype), copy=False)
    return _spread(form, value, env) if isinstance(form, PerRow) else value


# --- promises --------------------------------------------------------------------------------------------------


def check_range(who: str, column: Column, value: A) -> None:
    """In every mode: integers lie in the range that is promised of them. Raises PromiseBroken naming the element."""
    flat = value.reshape(-1)
    for below in (promise.below for promise in column.promises if isinstance(promise, Range)):
        if not len(flat) or (flat.max() < below and (flat.dtype.kind == "u" or flat.min() >= 0)):
            continue
        odd = np.flatnonzero((flat < 0) | (flat >= below))
        if len(odd):
            at = int(odd[0])
            raise _broken(who, column, f"element {at} is {flat[at]}, and the bound is {below}", at, value)


def verify(who: str, column: Column, value: A, env: Mapping[str, Any]) -> None:
    """Verify mode: the value is what its promises say. Raises PromiseBroken naming hop, column and element."""
    check_range(who, column, value)
    value = value.astype(dtype_of(column.dtype), copy=False)
    for promise in column.promises:
        if isinstance(promise, Derived):
            _same(who, column, value, _derived(who, column, promise, env))
        elif not isinstance(promise, Range):
            as_promised = msgspec.structs.replace(
                column, form=promise, stored=column.dtype, stored_shape=column.shape
            )
            _same(
                who, column, value, unpack(as_promised, pack(who, as_promised, value, env), value.shape, env)
            )


def _derived(who: str, column: Column, promise: Derived, env: Mapping[str, Any]) -> A:
    try:
        return np.asarray(import_object(promise.by)(*(env[name] for name in promise.sources)))
    except Exception as error:  # a user's function
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise _broken(who, column, f"{promise.by} raises {said} for {', '.join(promise.sources)}") from error


def _same(who: str, column: Column, value: A, made: A) -> None:
    if made.dtype != value.dtype or made.shape != value.shape:
        raise _broken(who, column, f"it is {_type(value)}, and would have to be {_type(made)}")
    bits = np.dtype(f"u{value.dtype.itemsize}")  # so that NaN equals itself, and 0.0 is not -0.0
    given, wanted = (np.ascontiguousarray(one).reshape(-1) for one in (value, made))
    differs = np.flatnonzero(given.view(bits) != wanted.view(bits))
    if len(differs):
        at = int(differs[0])
        text = f"element {at} is {given[at]}, and would have to be {wanted[at]}"
        help = SIGNED_ZERO if given[at] == wanted[at] else ""
        raise _broken(who, column, text, at, value, help)


def _check_bounds(who: str, column: Column, port: str, value: A, env: Mapping[str, Any]) -> None:
    bounds = _bounds(port, env)
    if len(bounds) and bounds[0] == 0 and bounds[-1] == len(value) and not (bounds[1:] < bounds[:-1]).any():
        return
    said = f"{port} is {np.array2string(bounds, threshold=8)}, and would have to rise from 0 to {len(value)}"
    raise _broken(who, column, said)


def _bounds(port: str, env: Mapping[str, Any]) -> A:
    """Where rows begin and end, in a dtype that can be reckoned with."""
    return np.asarray(env[port]).astype(np.int64, copy=False)


def _type(value: A) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _broken(
    who: str, column: Column, what: str, at: int | None = None, value: A | None = None, help: str = ""
) -> PromiseBroken:
    """help: a better fix than the usual one.

    at: the element at fault, counted over the whole value; the error knows its place along the first dim
    """
    error = PromiseBroken(
        f"hop {who} breaks the promise {', '.join(column.facts)} of {column.name}: {what}",
        help or f"keep the promise in the hop, or take it off the annotation of {column.name}",
    )
    if at is not None and value is not None and value.ndim:
        error.at = column.shape[0], at // max(1, value[0].size)
    return error


# --- one value a row -------------------------------------------------------------------------------------------


def _carriers(form: PerRow, env: Mapping[str, Any]) -> tuple[A, A, A]:
    """(bounds, for each row the place of its carrying token, whether it has one)."""
    bounds = _bounds(form.bounds, env)
    starts, ends = bounds[:-1], bounds[1:]
    if not form.mask:
        at = ends - 1 if form.last else starts
        return bounds, at, ends > starts
    valid = np.flatnonzero(env[form.mask])
    if form.last:
        found = np.searchsorted(valid, ends) - 1
        at = valid[np.maximum(found, 0)] if len(valid) else starts
        return bounds, at, (found >= 0) & (at >= starts)
    found = np.searchsorted(valid, starts)
    at = valid[np.minimum(found, len(valid) - 1)] if len(valid) else starts
    return bounds, at, (found < len(valid)) & (at < ends) if len(valid) else np.zeros(len(starts), np.bool_)


def _first(form: PerRow, value: A, env: Mapping[str, Any]) -> A:
    _, at, carried = _carriers(form, env)
    out = np.zeros((len(at), *value.shape[1:]), value.dtype)
    out[carried] = value[at[carried]]
    return out


def _spread(form: PerRow, rows: A, env: Mapping[str, Any]) -> A:
    bounds, at, carried = _carriers(form, env)
    out = np.zeros((int(bounds[-1]), *rows.shape[1:]), rows.dtype)
    if form.last:
        out[at[carried]] = rows[carried]
        return out
    tiled = np.repeat(rows, np.diff(bounds), axis=0)
    if not form.mask:
        return tiled
    valid = np.flatnonzero(env[form.mask])
    out[valid] = tiled[valid]
    return out


# --- shared prefixes -------------------------------------------------------------------------------------------


def _prefixed(form: Prefix, value: A, env: Mapping[str, Any]) -> A:
    bits = f"u{value.dtype.itemsize}"  # so that 0.0 is not shared with -0.0
    value = np.ascontiguousarray(value).view(bits)
    bounds = _bounds(form.bounds, env)
    rows = [value[start:end] for start, end in itertools.pairwise(bounds)]
    places = np.array([_place(row, rows[:i]) for i, row in enumerate(rows)], np.int32).reshape(-1, 2)
    rest = [row[same:] for row, (_, same) in zip(rows, places.tolist(), strict=True)]
    whole = np.concatenate([value[:0], *rest])
    return np.concatenate([places[1:].reshape(-1).view(np.uint8), whole.view(np.uint8)])


def _place(row: A, earlier: Sequence[A]) -> tuple[int, int]:
    """(which of the earlier rows begins most like it, the last of several; how many elements they share)."""
    parent, same = 0, 0
    for i in range(len(earlier) - 1, -1, -1):
        most = min(len(row), len(earlier[i]))
        if most > same and earlier[i][same] == row[same]:  # else it can't have more in common
            differs = np.flatnonzero(row[:most] != earlier[i][:most])
            shared = int(differs[0]) if len(differs) else most
            if shared > same:
                parent, same = i, shared
    return parent, same


def _expanded(form: Prefix, column: Column, stored: A, env: Mapping[str, Any]) -> A:
    bounds = _bounds(form.bounds, env)
    ends = PLACE * max(0, len(bounds) - 2)
    places = np.zeros((len(bounds) - 1, 2), np.int32)
    places[1:] = stored[:ends].view(np.int32).reshape(-1, 2)
    rest = stored[ends:].view(dtype_of(column.stored))
    out = np.empty(int(bounds[-1]), rest.dtype)
    taken = 0
    for start, end, (parent, same) in zip(bounds[:-1], bounds[1:], places, strict=True):
        out[start : start + same] = out[bounds[parent] : bounds[parent] + same]
        left = end - start - same
        out[start + same : end] = rest[taken : taken + left]
        taken += left
    return out
