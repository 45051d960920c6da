"""Rows → parts under a token cap: what stands in one micro-batch. Pure numpy.

What stays together is a trajectory, with all its leaves (a *unit*); where rows don't say theirs, a row. Rows without
a masked token are left out; the others count up to the token before their last masked one. Parts and their order
depend on the content of rows only, not on how they are numbered.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .protocol import Rows

Ints = npt.NDArray[np.int64]

# Adding up the gradients of one more part takes about as long as computing so many positions.
_PART = 64


class Row(NamedTuple):
    """A row with something to train on: where it begins in `Rows.tokens`, its input, its masked positions.

    key: bytes that sort as its tokens do, each with what was chosen for it
    """

    start: int
    inputs: npt.NDArray[np.int32]
    masked: Ints  # counted from the row's first token; all ≥ 1
    key: bytes


def padded_parts(rows: Rows, max_tokens: int) -> Iterator[list[Row]]:
    """Parts of rows of similar length: the cost of a part is its number of rows times its longest row."""

    def longest(unit: list[Row]) -> int:
        return max(len(row.inputs) for row in unit)

    part: list[Row] = []
    for unit in sorted(_units(rows), key=lambda unit: (longest(unit), _keys_of(unit))):
        if part and (len(part) + len(unit)) * longest(unit) > max_tokens:
            yield part
            part = []
        part = part + unit
    if part:
        yield part


def packed_parts(rows: Rows, max_tokens: int) -> Iterator[list[Row]]:
    """The largest unit first, each to the first part that has room for it."""

    def size(unit: list[Row]) -> int:
        return sum(len(row.inputs) for row in unit)

    parts: list[list[Row]] = []
    room: list[int] = []
    for unit in sorted(_units(rows), key=lambda unit: (-size(unit), _keys_of(unit))):
        at = next((i for i, free in enumerate(room) if free >= size(unit)), len(parts))
        if at == len(parts):
            parts.append([])
            room.append(max_tokens)
        parts[at] += unit
        room[at] -= size(unit)
    yield from parts


def tree_parts(rows: Rows, max_tokens: int) -> Iterator[list[Row]]:
    """Units in lexicographic order, cut where the least is laid twice: between groups, if one fits into a part.

    The cheapest way to cut the first n units is the cheapest, over the last part's first unit, of the way to cut those
    before it and that part. A unit is counted without what it shares with the one before it; with others it shares no
    more, unless its leaves sort apart, and then a part has fewer positions than was reckoned.
    """
    units = sorted(_units(rows), key=_keys_of)
    own_n = np.array([_fresh([], unit, rows) for unit in units], np.int64)
    fresh_n = np.array([_fresh(*pair, rows) for pair in itertools.pairwise(units)], np.int64)
    laid_n = np.cumsum(np.append(own_n[:1], fresh_n))
    least, first = np.zeros(len(units) + 1), np.zeros(len(units) + 1, np.int64)
    for n in range(1, len(units) + 1):
        size_n = own_n[:n] + laid_n[n - 1] - laid_n[:n]  # of the part that begins with each unit
        fits_n = size_n <= max_tokens
        fits_n[-1] = True  # a unit that is too large stands alone
        price_n = np.where(fits_n, least[:n] + size_n + _PART, np.inf)
        first[n] = price_n.argmin()
        least[n] = price_n[first[n]]
    bounds = [len(units)]
    while bounds[-1]:
        bounds.append(int(first[bounds[-1]]))
    for start, stop in itertools.pairwise(reversed(bounds)):
        yield sorted(itertools.chain(*units[start:stop]), key=lambda row: row.key)


def _fresh(part: list[Row], unit: list[Row], rows: Rows) -> int:
    """How many tokens of the unit are not in the trie of the part; both are in lexicographic order.

    In that order, of all rows those beside it have the longest beginnings in common with a row.
    """
    total = 0
    for i, row in enumerate(unit):
        at = bisect(part, row.key, key=lambda row: row.key)
        beside = [*part[max(at - 1, 0) : at + 1], *unit[max(i - 1, 0) : i]]
        total += len(row.inputs) - max((shared_with(other, row, rows) for other in beside), default=0)
    return total


def shared_with(before: Row, row: Row, rows: Rows) -> int:
    """How many first tokens the two rows have in common, and with them all that was recorded."""
    n = min(len(before.inputs), len(row.inputs))
    n = _alike(before.inputs[:n] != row.inputs[:n])
    if rows.recorded is not None and rows.side:
        one, other = slice(before.start, before.start + n), slice(row.start, row.start + n)
        differs = rows.recorded[one] != rows.recorded[other]
        for values in rows.side.values():
            differs |= rows.recorded[one] & np.any(values[one] != values[other], axis=(1, 2))
        n = _alike(differs)
    return n


def _alike(differs: npt.NDArray[np.bool_]) -> int:
    """How many stand before the first that differs."""
    return int(differs.argmax()) if differs.any() else len(differs)


def _units(rows: Rows) -> Iterator[list[Row]]:
    """The rows to train on by trajectory, those of each in lexicographic order."""
    found: dict[int, list[Row]] = {}
    for number, row in _live(rows):
        found.setdefault(number if rows.trajectory is None else int(rows.trajectory[number]), []).append(row)
    for unit in found.values():
        yield sorted(unit, key=lambda row: row.key)


def _live(rows: Rows) -> Iterator[tuple[int, Row]]:
    bounds = rows.offsets.tolist()
    key_TB = _keys(rows)
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        masked = np.flatnonzero(rows.mask[start:stop])
        if len(masked):
            end = start + masked[-1]
            yield number, Row(start, rows.tokens[start:end], masked, key_TB[start:end].tobytes())


def _keys(rows: Rows) -> npt.NDArray[np.uint8]:
    """Per token the bytes that rows are sorted by: its id, and with side channels a hash of what they recorded of it.

    Rows whose choices differ seldom have one hash; then they only stand less well for sharing (see `shared_with`).
    """
    parts = [rows.tokens.astype(">i4").view(np.uint8).reshape(-1, 4)]
    if rows.recorded is not None and rows.side:
        hash_T = np.zeros(len(rows.tokens), np.uint64)
        random = np.random.default_rng(0)  # fixed, so that the order of rows depends on their content only
        for name in sorted(rows.side):
            values = rows.side[name]
            factors = random.integers(1 << 64, size=values.shape[1:], dtype=np.uint64)
            hash_T += np.einsum("tlk,lk->t", values, factors, dtype=np.uint64, casting="unsafe")
        hash_T = np.where(rows.recorded, hash_T | np.uint64(1), np.uint64(0))
        parts.append(hash_T.astype(">u8").view(np.uint8).reshape(-1, 8))
    return np.concatenate(parts, axis=1)


def _keys_of(unit: list[Row]) -> list[bytes]:
    return [row.key for row in unit]
