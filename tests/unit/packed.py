"""Rows for packing, and what attention sees in the micro-batches that they become."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flowgraph.learners.pack import Micro, Packing
from flowgraph.learners.protocol import Rows

PACKINGS: tuple[Packing, ...] = ("padded", "packed", "tree")


def make_rows(tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], **fields: object) -> Rows:
    offsets = np.cumsum([0, *map(len, tokens)]).astype(np.int64)
    flat = np.array(list(itertools.chain(*tokens)), np.int32)
    mask = np.array(list(itertools.chain(*masks)), np.bool_)
    return Rows(flat, offsets, mask, {name: np.asarray(values) for name, values in fields.items()})


def paths(micro: Micro) -> dict[int, npt.NDArray[np.int64]]:
    """position → the positions that attention lets it see, itself last."""
    if not micro.buckets:
        length = len(micro.token_T) // micro.lines
        return {at: np.arange(at - at % length, at + 1) for at in range(len(micro.token_T))}
    out: dict[int, npt.NDArray[np.int64]] = {}
    for bucket in micro.buckets:
        for queries, keys in zip(bucket.query_RQ, bucket.key_RK, strict=True):
            for query in queries[queries >= 0]:
                assert query not in out, "a position is the query of one run"
                path = keys[: micro.depth_T[query] + 1]
                assert path[-1] == query
                assert (path >= 0).all()
                out[int(query)] = path
    assert len(out) == len(micro.token_T)
    return out
