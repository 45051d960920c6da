"""Rows of tokens → micro-batches under a token cap. Pure numpy: nothing here knows a model.

Two ways to lay rows out, with the same loss and gradient:

- `padded`: rows of similar length side by side, padded on the right.
- `tree`: every distinct prefix once. Rows are sorted, so that a row follows the one it shares most with; only
  its tokens past that shared prefix (its *fresh* tokens) are laid down, and they attend to its whole path
  from the root. Samples of one prompt share the prompt, forked leaves share their trunk, and samples that
  begin alike share their beginning. What the engine chose for a token (`Rows.side`) is a part of it here: where two
rows have the same tokens and other choices, each has positions of its own.

In both, a row enters the model only up to the token before its last masked one: what stands behind is neither
trained nor seen by anything that is.

Shapes: T packed positions of one forward pass; N masked tokens; U distinct positions that predict them
(U ≤ N: the first tokens of all samples of a prompt are predicted by one position); R runs of a bucket; Q
queries and K keys of a run, padded to the longest of the bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .protocol import Rows

Ints = npt.NDArray[np.int64]
Packing = Literal["padded", "tree"]

# Long runs are cut into this many queries: a causal run then reads little more than half of its square of
# scores, and the scores of one bucket stay small.
_QUERIES = 128
# What opening one more bucket costs, in units of one score per head.
_BUCKET_COST = 16_384
# Scores per head of one bucket, which exist all at once: 4 MB a head in bfloat16.
_BUCKET_MAX = 1 << 21


class Bucket(NamedTuple):
    """Runs of queries, each with the keys on its path from the root; -1 pads both.

    query_RQ: positions in T; key_RK: positions in T, key j of a run has depth j
    """

    query_RQ: Ints
    key_RK: Ints


class Micro(NamedTuple):
    """One forward pass.

    token_T, depth_T: the tokens laid down, and how many tokens stand before each in its row
    source_T: where each stands in `Rows.tokens`, of a shared one in one of its rows; -1 for padding
    lines: how many right-padded lines of equal length T is made of (1 for a tree)
    buckets: the attention of a tree; empty when padded, where ordinary causal attention is right
    predictor_U: positions in T whose logits are needed
    which_N, target_N: masked token n is target_N[n], predicted at predictor_U[which_N[n]]; which_N ascends
    source_N: where masked token n stands in `Rows.tokens`
    """

    token_T: Ints
    depth_T: Ints
    source_T: Ints
    lines: int
    buckets: tuple[Bucket, ...]
    predictor_U: Ints
    which_N: Ints
    target_N: Ints
    source_N: Ints


class _Row(NamedTuple):
    """A row with something to train on: where it begins in `Rows.tokens`, its input, its masked positions.

    key: bytes that sort as its tokens do, each with what was chosen for it
    """

    start: int
    inputs: npt.NDArray[np.int32]
    masked: Ints  # counted from the row's first token; all ≥ 1
    key: bytes


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
            finite = np.isfinite(values.reshape(total, -1)).all(axis=1) | ~rows.mask
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


def pack(rows: Rows, how: Packing, max_tokens: int) -> list[Micro]:
    """Micro-batches of at most `max_tokens` positions, padding included; their order depends on content only.

    A longer row stands alone. Rows without a masked token are left out. Expects rows that pass `check_rows`.
    """
    live = list(_live(rows))
    if how == "tree":
        return [_tree(part, rows) for part in _split_sorted(live, rows, max_tokens)]
    return [_padded(part, rows) for part in _split_padded(live, max_tokens)]


def fill(micros: Sequence[Micro], number: int, how: Packing) -> list[Micro]:
    """So many micro-batches: behind these, ones of a single padding position that predict nothing (U = N = 0).

    Ranks that have fewer than others run these, so that each forward pass has its collectives on every rank.
    """
    run = np.zeros((1, 1), np.int64)
    buckets = () if how == "padded" else (Bucket(run, run),)
    none, zero = np.empty(0, np.int64), np.zeros(1, np.int64)
    empty = Micro(zero, zero, zero - 1, 1, buckets, none, none, none, none)
    return [*micros, *[empty] * (number - len(micros))]


def _live(rows: Rows) -> Iterator[_Row]:
    bounds = rows.offsets.tolist()
    key_TB = _keys(rows)
    for start, stop in itertools.pairwise(bounds):
        masked = np.flatnonzero(rows.mask[start:stop])
        if len(masked):
            end = start + masked[-1]
            yield _Row(start, rows.tokens[start:end], masked, key_TB[start:end].tobytes())


def _keys(rows: Rows) -> npt.NDArray[np.uint8]:
    """Per token the bytes that rows are sorted by: its id, and with side channels a hash of what they recorded of it.

    Rows whose choices differ seldom have one hash; then they only stand less well for sharing (see `_shared`).
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


def _shared(before: _Row, row: _Row, rows: Rows) -> int:
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


def _split_sorted(live: list[_Row], rows: Rows, max_tokens: int) -> Iterator[list[tuple[_Row, int]]]:
    """Parts of (row, tokens shared with the row before it), the rows in lexicographic order."""
    part: list[tuple[_Row, int]] = []
    used = 0
    for row in sorted(live, key=lambda row: row.key):
        shared = _shared(part[-1][0], row, rows) if part else 0
        if part and used + len(row.inputs) - shared > max_tokens:
            yield part
            part, used, shared = [], 0, 0
        part.append((row, shared))
        used += len(row.inputs) - shared
    if part:
        yield part


def _split_padded(live: list[_Row], max_tokens: int) -> Iterator[list[_Row]]:
    """Parts of rows of similar length: the cost of a part is its number of rows times its longest row."""
    part: list[_Row] = []
    for row in sorted(live, key=lambda row: (len(row.inputs), row.key)):
        if part and (len(part) + 1) * len(row.inputs) > max_tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _tree(part: list[tuple[_Row, int]], rows: Rows) -> Micro:
    paths: list[Ints] = []
    runs: list[tuple[Ints, Ints]] = []
    source, path, laid = [], np.empty(0, np.int64), 0
    for row, shared in part:
        new = len(row.inputs) - shared
        path = np.concatenate([path[:shared], np.arange(laid, laid + new)])
        paths.append(path)
        source.append(np.arange(row.start + shared, row.start + len(row.inputs)))
        laid += new
        for first in range(shared, len(path), _QUERIES):
            last = min(first + _QUERIES, len(path))
            runs.append((path[first:last], path[:last]))
    depth_T = np.empty(laid, np.int64)
    for queries, keys in runs:
        depth_T[queries] = np.arange(len(keys) - len(queries), len(keys))
    source_T = np.concatenate(source)
    token_T = rows.tokens[source_T].astype(np.int64)
    chosen = [row for row, _ in part]
    return Micro(token_T, depth_T, source_T, 1, tuple(_buckets(runs)), *_targets(chosen, paths, rows))


def _padded(part: list[_Row], rows: Rows) -> Micro:
    longest = max(len(row.inputs) for row in part)
    token_BL = np.zeros((len(part), longest), np.int64)
    source_BL = np.full_like(token_BL, -1)
    for line, row in enumerate(part):
        token_BL[line, : len(row.inputs)] = row.inputs
        source_BL[line, : len(row.inputs)] = np.arange(row.start, row.start + len(row.inputs))
    depth_T = np.tile(np.arange(longest), len(part))
    paths = [line * longest + np.arange(len(row.inputs)) for line, row in enumerate(part)]
    targets = _targets(part, paths, rows)
    return Micro(token_BL.ravel(), depth_T, source_BL.ravel(), len(part), (), *targets)


def _targets(part: Sequence[_Row], paths: Sequence[Ints], rows: Rows) -> tuple[Ints, Ints, Ints, Ints]:
    """predictor_U, which_N, target_N, source_N. Token i is predicted at i-1: the only place that shifts."""
    position_N = np.concatenate([path[row.masked - 1] for row, path in zip(part, paths, strict=True)])
    source_N = np.concatenate([row.start + row.masked for row in part])
    order = np.argsort(position_N, kind="stable")
    predictor_U, which_N = np.unique(position_N[order], return_inverse=True)
    source_N = source_N[order]
    return predictor_U, which_N.astype(np.int64), rows.tokens[source_N].astype(np.int64), source_N


def _buckets(runs: Sequence[tuple[Ints, Ints]]) -> Iterator[Bucket]:
    """Batch runs of similar shape, so that padding costs less than the bucket it saves."""
    held: list[tuple[Ints, Ints]] = []
    area = queries = keys = 0
    for run in sorted(runs, key=lambda run: (len(run[0]), len(run[1]))):
        if not len(run[0]):
            continue
        q, k = max(queries, len(run[0])), max(keys, len(run[1]))
        apart = area + len(run[0]) * len(run[1])
        if held and (len(held) + 1) * q * k > min(apart + _BUCKET_COST, _BUCKET_MAX):
            yield _bucket(held)
            held, area, q, k = [], 0, len(run[0]), len(run[1])
        held.append(run)
        area, queries, keys = len(held) * q * k, q, k
    if held:
        yield _bucket(held)


def _bucket(runs: list[tuple[Ints, Ints]]) -> Bucket:
    return Bucket(_stack([queries for queries, _ in runs]), _stack([keys for _, keys in runs]))


def _stack(ragged: list[Ints]) -> Ints:
    out = np.full((len(ragged), max(map(len, ragged))), -1, np.int64)
    for line, values in zip(out, ragged, strict=True):
        line[: len(values)] = values
    return out


def positions(micros: Sequence[Micro]) -> int:
    """How many positions, padding included, the model computes for these micro-batches."""
    return sum(len(micro.token_T) for micro in micros)


def select(micro: Micro, fields: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The fields of the micro-batch's masked tokens, in the order of its targets."""
    return {name: values[micro.source_N] for name, values in fields.items()}
