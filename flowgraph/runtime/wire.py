"""Forms of columns and their inverses: what a hop gives becomes what lies in a block, and back, bit for bit.

`env` holds what the writer had: its inputs and outputs by port. Every pair is pure numpy over one row's value.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flowgraph.errors import PromiseBroken
from flowgraph.plan.plan import Column
from flowgraph.spec.config import import_object
from flowgraph.spec.forms import Bits, Derived, PerRow, Prefix, Range
from flowgraph.spec.types import dtype_of

A = npt.NDArray[Any]


def pack(who: str, column: Column, value: A, env: Mapping[str, Any]) -> A:
    """The array that lies in a block: for a Prefix its raw bytes. Raises PromiseBroken for integers beyond their bound.

    who: the hop, for messages.
    """
    form = column.form
    if isinstance(form, PerRow):
        value = _first(form, value, env)
    if column.stored != column.dtype:
        value = _narrowed(who, column, value)
    if isinstance(form, Bits):
        return np.packbits(value.reshape(-1))
    return _prefixed(form, value, env) if isinstance(form, Prefix) else value


def unpack(column: Column, stored: A, shape: tuple[int, ...], env: Mapping[str, Any]) -> A:
    """What the hop gave. shape: of the value, where the form alone does not say it."""
    form = column.form
    if isinstance(form, Bits):
        count = int(np.prod(shape, dtype=np.int64))
        return np.unpackbits(stored, count=count).view(np.bool_).reshape(shape)
    if isinstance(form, Prefix):
        stored = _expanded(form, column, stored, env)
    value = stored if column.stored == column.dtype else stored.astype(dtype_of(column.dtype))
    return _spread(form, value, env) if isinstance(form, PerRow) else value


def verify(who: str, column: Column, value: A, env: Mapping[str, Any]) -> None:
    """Verify mode: the value is what its promises say. Raises PromiseBroken naming hop, field and element."""
    for promise in column.promises:
        if isinstance(promise, Derived):
            made = np.asarray(import_object(promise.by)(*(env[name] for name in promise.sources)))
        elif isinstance(promise, Range):
            _in_range(who, column, value, promise.below)
            continue
        else:
            as_promised = msgspec.structs.replace(
                column, form=promise, stored=column.dtype, stored_shape=column.shape
            )
            made = unpack(as_promised, pack(who, as_promised, value, env), value.shape, env)
        _same(who, column, value, made)


def _same(who: str, column: Column, value: A, made: A) -> None:
    if made.dtype != value.dtype or made.shape != value.shape:
        raise _broken(
            who, column, f": it is {value.dtype}{list(value.shape)}, not {made.dtype}{list(made.shape)}"
        )
    bits = np.dtype(f"u{value.dtype.itemsize}")  # so that NaN equals itself, and 0.0 is not -0.0
    given, wanted = (np.ascontiguousarray(one).reshape(-1) for one in (value, made))
    differs = np.flatnonzero(given.view(bits) != wanted.view(bits))
    if len(differs):
        at = int(differs[0])
        raise _broken(who, column, f": element {at} is {given[at]}, and would have to be {wanted[at]}")


def _in_range(who: str, column: Column, value: A, below: int) -> None:
    odd = np.flatnonzero((value.reshape(-1) < 0) | (value.reshape(-1) >= below))
    if len(odd):
        at = int(odd[0])
        raise _broken(who, column, f": element {at} is {value.reshape(-1)[at]}, and the bound is {below}")


def _broken(who: str, column: Column, where: str) -> PromiseBroken:
    text = f"hop {who} breaks the promise {', '.join(column.facts)} of {column.name}{where}"
    return PromiseBroken(text, f"keep the promise in the hop, or take it off the annotation of {column.name}")


def _narrowed(who: str, column: Column, value: A) -> A:
    limit = int(np.iinfo(dtype_of(column.stored)).max)
    _in_range(who, column, value, limit + 1)
    return value.astype(dtype_of(column.stored))


# --- one value a row -------------------------------------------------------------------------------------------


def _carriers(form: PerRow, env: Mapping[str, Any]) -> tuple[A, A, A]:
    """(bounds, for each row the place of its carrying token, whether it has one)."""
    bounds = np.asarray(env[form.bounds])
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
    out = np.zeros(len(at), value.dtype)
    out[carried] = value[at[carried]]
    return out


def _spread(form: PerRow, rows: A, env: Mapping[str, Any]) -> A:
    bounds, at, carried = _carriers(form, env)
    length = int(bounds[-1]) if len(bounds) else 0
    if form.last:
        out = np.zeros(length, rows.dtype)
        out[at[carried]] = rows[carried]
        return out
    tiled = np.repeat(rows, np.diff(bounds))
    return np.where(np.asarray(env[form.mask]), tiled, np.zeros((), rows.dtype)) if form.mask else tiled


# --- shared prefixes -------------------------------------------------------------------------------------------


def _prefixed(form: Prefix, value: A, env: Mapping[str, Any]) -> A:
    bounds = np.asarray(env[form.bounds])
    shared = np.zeros(max(0, len(bounds) - 1), np.int32)
    rest: list[A] = []
    value = value.view(f"u{value.dtype.itemsize}")  # bits: 0.0 and -0.0 are equal, and not the same
    before = value[:0]
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        row = value[start:end]
        most = min(len(row), len(before))
        differs = np.flatnonzero(row[:most] != before[:most])
        shared[i] = differs[0] if len(differs) else most
        rest.append(row[shared[i] :])
        before = row
    whole = np.concatenate([value[:0], *rest])
    return np.concatenate([shared.view(np.uint8), np.ascontiguousarray(whole).view(np.uint8)])


def _expanded(form: Prefix, column: Column, stored: A, env: Mapping[str, Any]) -> A:
    bounds = np.asarray(env[form.bounds])
    count = max(0, len(bounds) - 1)
    shared = stored[: 4 * count].view(np.int32)
    rest = stored[4 * count :].view(dtype_of(column.stored))
    out = np.empty(int(bounds[-1]) if count else 0, rest.dtype)
    taken, before = 0, 0
    for start, end, same in zip(bounds[:-1], bounds[1:], shared, strict=True):
        out[start : start + same] = out[before : before + same]
        left = end - start - same
        out[start + same : end] = rest[taken : taken + left]
        taken, before = taken + left, start
    return out
