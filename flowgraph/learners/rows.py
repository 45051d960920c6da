"""The rows of a batch: checked, taken, and cut into minibatches. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .partition import Ints, cut
from .protocol import Rows


def check_rows(rows: Rows, *, vocabulary: int, context: int) -> None:
    """Raise ValueError, naming the row or field, for what cannot be trained on (see `Learner.step`)."""
    offsets, total = rows.offsets, len(rows.tokens)
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(f"offsets must run from 0 to the number of tokens, {total}")
    for row in np.flatnonzero(np.diff(offsets) < 0):
        raise ValueError(f"row {row}: its offsets {offsets[row]}, {offsets[row + 1]} are out of order")
    if rows.mask.shape != (total,) or rows.mask.dtype != np.bool_:
        raise ValueError(f"mask must be bool[{total}], not {rows.mask.dtype}{list(rows.mask.shape)}")
    _check_tokens(rows, vocabulary, context)
    _check_side(rows)
    of = rows.trajectory
    if of is not None and (of.shape != (len(offsets) - 1,) or of.dtype.kind not in "iu"):
        raise ValueError(
            f"trajectory must be integers [{len(offsets) - 1}], one a row, not {of.dtype}{list(of.shape)}"
        )
    for name, values in rows.fields.items():
        if values.shape[:1] != (total,):
            raise ValueError(
                f"field {name!r} must have one value per token ({total}), not shape {values.shape}"
            )
        if values.dtype.kind not in "biu":
            finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim))) | ~rows.mask
            for token in np.flatnonzero(~finite):
                raise ValueError(
                    f"row {_row_of(rows, token)}: field {name!r} is {values[token]} at token {token}"
                )


def _check_tokens(rows: Rows, vocabulary: int, context: int) -> None:
    for token in np.flatnonzero((rows.tokens < 0) | (rows.tokens >= vocabulary)):
        raise ValueError(
            f"row {_row_of(rows, token)}: token id {rows.tokens[token]} is not below {vocabulary}"
        )
    for row, length in enumerate(np.diff(rows.offsets)):
        if length > context:
            raise ValueError(f"row {row}: {length} tokens exceed the model's context of {context}")
        if length and rows.mask[rows.offsets[row]]:
            raise ValueError(f"row {row}: no prompt token stands before its first masked token")


def _check_side(rows: Rows) -> None:
    total, recorded = len(rows.tokens), rows.recorded
    if rows.side and (recorded is None or recorded.shape != (total,) or recorded.dtype != np.bool_):
        what = "missing" if recorded is None else f"{recorded.dtype}{list(recorded.shape)}"
        raise ValueError(f"recorded must be bool[{total}] beside side channels; it is {what}")
    for name, values in rows.side.items():
        if values.ndim != 3 or len(values) != total or values.dtype.kind not in "iu":
            raise ValueError(
                f"side channel {name!r} must be integers [{total}, layers, k], not {values.dtype}{list(values.shape)}"
            )


def _row_of(rows: Rows, token: np.integer[Any]) -> int:
    return int(np.searchsorted(rows.offsets, token, side="right")) - 1


def take(rows: Rows, order: npt.ArrayLike) -> Rows:
    """The rows of these numbers, in this order, with all that they have."""
    order_n = np.asarray(order, np.int64)
    length_n = np.diff(rows.offsets)[order_n]
    offsets = np.concatenate([[0], np.cumsum(length_n)]).astype(np.int64)
    token_T = np.arange(offsets[-1]) + np.repeat(rows.offsets[order_n] - offsets[:-1], length_n)

    def taken(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return {name: values[token_T] for name, values in columns.items()}

    return Rows(
        rows.tokens[token_T],
        offsets,
        rows.mask[token_T],
        taken(rows.fields),
        taken(rows.side),
        None if rows.recorded is None else rows.recorded[token_T],
        None if rows.trajectory is None else rows.trajectory[order_n],
    )


def trajectories(rows: Rows) -> Ints:
    """i64[leaf]: the number of each row's trajectory, from 0, in the order of their ids."""
    if rows.trajectory is None:
        return np.arange(len(rows.offsets) - 1)
    return np.unique(rows.trajectory, return_inverse=True)[1].astype(np.int64)


def minibatches(
    rows: Rows,
    count: int,
    place_L: Ints | None = None,
    gather: Callable[[Ints], Sequence[Ints]] = lambda own_N: [own_N],
) -> list[Rows]:
    """This rank's rows of each of `count` parts of the step: whole trajectories in the step's order, about as many in
    each part. A part is the same for any number of ranks; one of them may have no row in it.

    place_L: i64[leaf], where each row stands in the step; None: the rows are all of it
    gather: what every rank gives
    """
    of_L = trajectories(rows)
    place_L = np.arange(len(of_L)) if place_L is None else place_L
    first_N = np.full(of_L.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_N, of_L, place_L)
    step_N = np.sort(np.concatenate(gather(first_N)))
    part_N = cut(len(step_N), count)[np.searchsorted(step_N, first_N)]
    return [take(rows, np.flatnonzero(part_N[of_L] == part)) for part in range(count)]
