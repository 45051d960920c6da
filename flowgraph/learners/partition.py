"""Who takes which rows: what a row costs, and its way to a data-parallel rank. Pure numpy, and the same everywhere.

The steps of a batch before its forward pass, in order (docs/train.md walks one batch through them):

1. No row is added: a rank takes as many as it is given, and `pack.fill` evens out the micro-batches.
2. `reorder`: by cost, the dearest first.
3. `partition`, or `split` where rows of a group share a prompt, of each optimiser step by itself: which rank takes
   which.
4. `runtime.pieces`: a rank reads its own rows, and what it gives for each comes back to its place.
5. `pack.pack`: a rank's micro-batches.

A row here is what stays whole: a trajectory with all its leaves. n rows, m parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flowgraph.models.facts import ModelFacts, layers_with_experts

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Work(NamedTuple):
    """What a row of n tokens costs: linear · n + quadratic · n², in floating point operations of a forward pass."""

    linear: float
    quadratic: float


def work(model: ModelFacts) -> Work:
    """2 · parameters a token, and 2 · layers · attention width for each pair of tokens that see each other.

    Kaplan et al. 2020 (arXiv 2001.08361, §2.1): forward is 2N + 2 · layers · context · width a token. Attention takes
    4 · width a key (scores and values), and a token of a causal row has half the row for keys on average, so that the
    sum over a row is 2 · layers · width · n². Backward is twice of it all, and changes no comparison. N counts what a
    token is multiplied with: the head and not the embedding, and of the experts those that are chosen.
    """
    names = [tensor.name for tensor in model.tensors]
    untied = any(name.endswith("lm_head.weight") for name in names)
    total = 0.0
    for tensor in model.tensors:
        if untied and tensor.name.endswith("embed_tokens.weight"):
            continue
        chosen = layers_with_experts([tensor.name]) and model.experts and model.top_k
        share = model.top_k / model.experts if chosen and model.top_k and model.experts else 1.0
        total += share * float(np.prod(tensor.shape, dtype=np.float64))
    return Work(2 * total, 2.0 * model.layers * model.heads * model.head_dim)


def cost(lengths: npt.ArrayLike, linear: float = 1.0, quadratic: float = 0.0) -> Floats:
    """f64[n]: linear · length + quadratic · length². For rows of a model: `cost(lengths, *work(facts))`."""
    length_n = np.asarray(lengths, np.float64)
    return np.asarray(linear * length_n + quadratic * length_n**2, np.float64)


def reorder(costs: npt.ArrayLike) -> Ints:
    """i64[n]: the rows from the dearest to the cheapest; those of equal cost as they stand."""
    return np.argsort(-np.asarray(costs, np.float64), kind="stable").astype(np.int64)


def partition(costs: npt.ArrayLike, parts: int, *, equal: bool = False) -> list[Ints]:
    """The rows of each of m parts, ascending, so that the dearest part is as cheap as can be. Every row is in one part.

    The dearest row first, each to the part that is cheapest so far (longest processing time first, Graham 1969); then
    rows are exchanged between the dearest part and the cheapest until no exchange helps. Deterministic: of equals the
    lowest number counts.

    costs: f64[n]; equal: no part gets more than ⌈n/m⌉ rows, so that the numbers of rows differ by as little as can be
    Raises ValueError for no parts, or for costs that are not finite or are negative.
    """
    cost_n = np.asarray(costs, np.float64)
    if parts < 1:
        raise ValueError(f"rows are for at least one part, not {parts}")
    if not (np.isfinite(cost_n) & (cost_n >= 0)).all():
        row = int(np.argmin(np.isfinite(cost_n) & (cost_n >= 0)))
        raise ValueError(f"row {row} costs {cost_n[row]:g}; a cost is finite and not negative")
    if parts == 1 or not len(cost_n):
        return [np.arange(len(cost_n)), *[np.arange(0)] * (parts - 1)]
    cap = -(-len(cost_n) // parts) if equal else len(cost_n)
    found = _cheapest_first(cost_n, parts, cap)
    # A row may also change places with nobody, who costs nothing: where a part has room for it.
    nobody, cost_n = len(cost_n), np.append(cost_n, 0.0)
    places = [part + [nobody] * (cap - len(part) if equal else 1) for part in found]
    exchanged = _exchange(cost_n, [np.array(part, np.int64) for part in places])
    return [np.sort(part[part != nobody]) for part in exchanged]


def _cheapest_first(cost_n: Floats, parts: int, cap: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, 0, part) for part in range(parts)]
    values = cost_n.tolist()
    for row in reorder(cost_n).tolist():
        load, held, part = heapq.heappop(heap)
        found[part].append(row)
        if held + 1 < cap:
            heapq.heappush(heap, (load + values[row], held + 1, part))
    return found


def _exchange(cost_n: Floats, parts: list[Ints]) -> list[Ints]:
    """Swap the pair of rows, of the dearest part and the cheapest, that makes these two most alike; and again."""
    load_m = np.array([cost_n[part].sum() for part in parts])
    for _ in range(4 * len(parts)):
        high, low = int(load_m.argmax()), int(load_m.argmin())
        gap = load_m[high] - load_m[low]
        given, taken = cost_n[parts[high]], cost_n[parts[low]]
        order = np.argsort(taken, kind="stable")
        # For each row that the dearest part may give, the row of the cheapest that costs half the gap less.
        wanted = given - gap / 2
        after = np.searchsorted(taken[order], wanted).clip(0, len(order) - 1)
        before = np.maximum(after - 1, 0)
        near = np.where(
            np.abs(taken[order[after]] - wanted) < np.abs(taken[order[before]] - wanted), after, before
        )
        i = int(np.abs(taken[order[near]] - wanted).argmin())
        j = int(order[near[i]])
        moved = given[i] - taken[j]
        if not 0 < moved < gap:
            break
        parts[high][i], parts[low][j] = parts[low][j], parts[high][i]
        load_m[high] -= moved
        load_m[low] += moved
    return parts


def split(
    costs: npt.ArrayLike,
    parts: int,
    *,
    group: npt.ArrayLike | None = None,
    shared: npt.ArrayLike | None = None,
) -> list[Ints]:
    """`partition` where rows of a group share what they begin with, and a part that has several computes that once.

    Whole groups cost least in all, single rows balance best; between them stand the groups in a line, cut where a part
    has its share. The way whose dearest part is cheapest is taken; of equals, the one that cuts fewer groups.

    costs: f64[n], of each row alone; group: i64[n]; shared: f64[n], the part of its cost that it shares with its group
    """
    if group is None or shared is None or parts == 1:
        return partition(costs, parts)
    cost_n, shared_n = np.asarray(costs, np.float64), np.asarray(shared, np.float64)
    _, group_n = np.unique(np.asarray(group), return_inverse=True)
    group_g = _priced(cost_n, shared_n, group_n)
    whole = [np.flatnonzero(np.isin(group_n, groups)) for groups in partition(group_g, parts)]
    ways = [whole, _line(cost_n, shared_n, group_n, parts), partition(cost_n, parts)]
    return min(ways, key=lambda way: max(_priced(cost_n[r], shared_n[r], group_n[r]).sum() for r in way))


def cut(rows: int, steps: int) -> Ints:
    """i64[n]: in which of a batch's optimiser steps each of n rows is: in their order, about as many in each."""
    return np.arange(rows) * steps // max(1, rows)


def split_steps(
    costs: npt.ArrayLike,
    parts: int,
    steps: int,
    *,
    group: npt.ArrayLike | None = None,
    shared: npt.ArrayLike | None = None,
) -> list[Ints]:
    """`split`, of the rows of each optimiser step (`cut`) by themselves: parts wait for each other in every one.

    The dearest share of a step goes to the part that has had least before it.
    """
    cost_n, step_n = np.asarray(costs, np.float64), cut(np.size(costs), steps)
    held: list[list[Ints]] = [[] for _ in range(parts)]
    had_m = np.zeros(parts)
    for step in range(steps):
        (row_k,) = np.nonzero(step_n == step)
        group_k, shared_k = (None if one is None else np.asarray(one)[row_k] for one in (group, shared))
        found = [row_k[at] for at in split(cost_n[row_k], parts, group=group_k, shared=shared_k)]
        found.sort(key=lambda rows: -cost_n[rows].sum())
        for part, rows in zip(np.argsort(had_m, kind="stable"), found, strict=True):
            held[part].append(rows)
            had_m[part] += cost_n[rows].sum()
    return [np.sort(np.concatenate(rows)) for rows in held]


def _line(cost_n: Floats, shared_n: Floats, group_n: Ints, parts: int) -> list[Ints]:
    """Group after group in a line, which is cut into parts of about equal cost."""
    order = np.argsort(group_n, kind="stable")
    first = np.diff(group_n[order], prepend=-1) > 0
    added = np.where(first, cost_n[order], (cost_n - shared_n)[order])
    middle = np.cumsum(added) - added / 2
    part = np.minimum(middle * parts / max(added.sum(), 1e-300), parts - 1).astype(np.int64)
    return [np.sort(order[part == i]) for i in range(parts)]


def _priced(cost_n: Floats, shared_n: Floats, group_n: Ints) -> Floats:
    """What the rows of each group cost together: what they share once, at its longest."""
    own_g = np.bincount(group_n, cost_n - shared_n)
    shared_g = np.zeros_like(own_g)
    np.maximum.at(shared_g, group_n, shared_n)
    return np.asarray(own_g + shared_g, np.float64)


def imbalance(costs: npt.ArrayLike, parts: Sequence[Ints]) -> float:
    """max / mean of what the parts cost: 1 where all wait for nobody."""
    cost_n = np.asarray(costs, np.float64)
    load_m = np.array([cost_n[part].sum() for part in parts])
    return float(load_m.max() / load_m.mean()) if load_m.any() else 1.0
