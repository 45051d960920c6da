"""Side channels in the layout of a micro-batch: what was recorded of each token follows it to its packed position.

Pure numpy, as pack.py is. Shapes: T packed positions; L layers; K choices of a token in a layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .pack import Ints, Micro

Bools = npt.NDArray[np.bool_]


class Laid(NamedTuple):
    """One channel of a micro-batch. given_T: where its row was recorded; elsewhere values_TLK is 0 and says nothing."""

    values_TLK: Ints
    given_T: Bools


class Attended(NamedTuple):
    """Packed positions that each packed position may attend to, in every layer.

    kept_TLK: the choices that count, distinct and at most min(K, depth + 1); elsewhere at_TLK is the own position
    given_T: where the row was recorded at all; elsewhere nothing is kept
    """

    at_TLK: Ints
    kept_TLK: Bools
    given_T: Bools


def lay(micro: Micro, values: npt.NDArray[np.integer[Any]], recorded: Bools) -> Laid:
    """Padding and rows that were not recorded are given nothing. values: [token, L, K]; recorded: bool[token]."""
    given_T = np.zeros(len(micro.source_T), np.bool_)
    real_T = micro.source_T >= 0
    given_T[real_T] = recorded[micro.source_T[real_T]]
    values_TLK = np.zeros((len(given_T), *values.shape[1:]), np.int64)
    values_TLK[given_T] = values[micro.source_T[given_T]]
    return Laid(values_TLK, given_T)


def lay_positions(micro: Micro, values: npt.NDArray[np.integer[Any]], recorded: Bools) -> Attended:
    """A channel of positions in a token's own row, such as an indexer's choice, as positions of the micro-batch.

    A token of depth d has d + 1 positions to choose from. What a channel repeats to fill its K places is trimmed.
    Raises ValueError for a position outside its row's beginning.
    """
    depth_TLK, given_T = lay(micro, values, recorded)
    wrong = ((depth_TLK < 0) | (depth_TLK > micro.depth_T[:, None, None])) & given_T[:, None, None]
    if wrong.any():
        t, layer, k = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"token {micro.source_T[t]}, layer {layer}: position {depth_TLK[t, layer, k]}, expected 0 to the token's "
            f"own, {micro.depth_T[t]}"
        )
    at_TLK = np.where(given_T[:, None, None], _on_path(micro, depth_TLK), 0)
    kept_TLK = _first_of_its_kind(at_TLK) & given_T[:, None, None]
    own_T11 = np.arange(len(given_T))[:, None, None]
    return Attended(np.where(kept_TLK, at_TLK, own_T11), kept_TLK, given_T)


def _on_path(micro: Micro, depth_TLK: Ints) -> Ints:
    """The packed position that stands at a depth of each position's path from its root."""
    if not micro.buckets:
        first_T = np.arange(len(micro.token_T)) - micro.depth_T
        return first_T[:, None, None] + depth_TLK
    at_TLK = np.zeros_like(depth_TLK)
    for query_RQ, key_RK in micro.buckets:
        run_I, place_I = np.nonzero(query_RQ >= 0)
        query_I = query_RQ[run_I, place_I]
        at_TLK[query_I] = key_RK[run_I[:, None, None], depth_TLK[query_I]]
    return at_TLK


def _first_of_its_kind(values_TLK: npt.NDArray[Any]) -> Bools:
    """Where a choice is none of those before it in its row."""
    order = np.argsort(values_TLK, axis=-1, kind="stable")
    ranked = np.take_along_axis(values_TLK, order, axis=-1)
    fresh = np.ones(ranked.shape, np.bool_)
    fresh[..., 1:] = ranked[..., 1:] != ranked[..., :-1]
    out = np.empty_like(fresh)
    np.put_along_axis(out, order, fresh, axis=-1)
    return out


def differs(one_TLK: npt.NDArray[np.integer[Any]], other_TLK: npt.NDArray[np.integer[Any]]) -> Bools:
    """bool[T, L]: whether two choices, each of its own number, differ as sets."""
    width = max(one_TLK.shape[-1], other_TLK.shape[-1])
    out: Bools = np.any(_as_set(one_TLK, width) != _as_set(other_TLK, width), axis=-1)
    return out


def _as_set(values_TLK: npt.NDArray[Any], width: int) -> Ints:
    """Ascending, each once, -1 for the rest."""
    once_TLK = np.where(_first_of_its_kind(values_TLK), values_TLK, -1).astype(np.int64)
    more = ((0, 0), (0, 0), (0, width - values_TLK.shape[-1]))
    return np.sort(np.pad(once_TLK, more, constant_values=-1), axis=-1)
