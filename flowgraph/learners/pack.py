"""Rows of tokens → micro-batches under a token cap. Pure numpy: nothing here knows a model.

Three ways to lay rows out, with the same loss and gradient:

- `padded`: rows of similar length side by side, padded on the right.
- `packed`: rows one behind the other in one line, each attending to itself only; positions begin at 0 in each.
- `tree`: every distinct prefix once. Rows are sorted, so that a row follows the one it shares most with; only
  its tokens past that shared prefix (its *fresh* tokens) are laid down, and they attend to its whole path
  from the root. Samples of one prompt share the prompt, forked leaves share their trunk, and samples that
  begin alike share their beginning: what is laid is the prefix trie of the rows. What the engine chose for a token
  (`Rows.side`) is a part of it here: where two rows have the same tokens and other choices, each has positions of
  its own.

In all, a row enters the model only up to the token before its last masked one: what stands behind is neither
trained nor seen by anything that is. Where rows say their trajectory, a micro-batch holds all leaves of each, so that
what is summed over a trajectory is there in one forward pass; what needs no such sum leaves it out, and only a
single row can then be longer than the cap.

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
from .units import Row, packed_parts, padded_parts, shared_with, tree_parts

Ints = npt.NDArray[np.int64]
Packing = Literal["padded", "packed", "tree"]

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


def pack(rows: Rows, how: Packing, max_tokens: int) -> list[Micro]:
    """Micro-batches of at most `max_tokens` positions, padding included; their order depends on content only.

    A trajectory, or a row where none is given, that is longer stands alone. Rows without a masked token are left out.
    Expects rows that pass `check_rows`.
    """
    if how == "padded":
        return [_padded(part, rows) for part in padded_parts(rows, max_tokens)]
    if how == "packed":
        return [_runs([(row, 0) for row in part], rows) for part in packed_parts(rows, max_tokens)]
    return [_tree(part, rows) for part in tree_parts(rows, max_tokens)]


def fill(micros: Sequence[Micro], number: int, how: Packing) -> list[Micro]:
    """So many micro-batches: behind these, ones of a single padding position that predict nothing (U = N = 0).

    Ranks that have fewer than others run these, so that each forward pass has its collectives on every rank.
    """
    run = np.zeros((1, 1), np.int64)
    buckets = () if how == "padded" else (Bucket(run, run),)
    none, zero = np.empty(0, np.int64), np.zeros(1, np.int64)
    empty = Micro(zero, zero, zero - 1, 1, buckets, none, none, none, none)
    return [*micros, *[empty] * (number - len(micros))]


def _tree(part: list[Row], rows: Rows) -> Micro:
    """Each row behind the one before it in lexicographic order, without what they have in common."""
    shared = [0, *(shared_with(before, row, rows) for before, row in itertools.pairwise(part))]
    return _runs(list(zip(part, shared, strict=True)), rows)


def _runs(part: list[tuple[Row, int]], rows: Rows) -> Micro:
    """Rows one behind the other, each without so many first tokens that it shares with the row before it."""
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


def _padded(part: list[Row], rows: Rows) -> Micro:
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


def _targets(part: Sequence[Row], paths: Sequence[Ints], rows: Rows) -> tuple[Ints, Ints, Ints, Ints]:
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
