"""Rows name the trajectories that they are leaves of; ranks and micro-batches get whole ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.learners.pack import Micro, Packing, fill, pack, positions
from flowgraph.learners.protocol import Rows
from flowgraph.learners.rows import check_rows, take, trajectories
from tests.unit.packed import PACKINGS, make_rows, paths

WAYS = (st.sampled_from(PACKINGS), st.integers(1, 40))


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Few token values, so that leaves share beginnings with leaves of their own trajectory and of others."""
    tokens = draw(st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=8))
    masks = [
        [False, *draw(st.lists(st.booleans(), min_size=len(r) - 1, max_size=len(r) - 1))] if r else []
        for r in tokens
    ]
    rows = make_rows(tokens, masks, logprobs=np.arange(sum(map(len, tokens)), dtype=np.float32))
    ids = draw(st.lists(st.integers(-3, 3), min_size=len(tokens), max_size=len(tokens)))
    return rows._replace(trajectory=np.array(ids, np.int64)) if draw(st.booleans()) else rows


def rows_in(micro: Micro, rows: Rows) -> list[int]:
    """The rows whose masked tokens it has."""
    found = np.searchsorted(rows.offsets, micro.source_N, side="right") - 1
    return sorted(set(found.tolist()))


def inputs(rows: Rows, row: int) -> tuple[int, ...]:
    """What of a row is computed: all that stands before its last masked token."""
    start, stop = rows.offsets[row : row + 2]
    last = int(np.flatnonzero(rows.mask[start:stop])[-1])
    return tuple(rows.tokens[start : start + last].tolist())


def trie(sequences: Sequence[tuple[int, ...]]) -> int:
    """The distinct beginnings, the empty one aside."""
    return len({one[:n] for one in sequences for n in range(1, len(one) + 1)})


# --- micro-batches -----------------------------------------------------------------------------------------------


@given(batches(), *WAYS)
def test_a_micro_batch_has_whole_trajectories_and_a_longer_one_stands_alone_B3(
    rows: Rows, how: Packing, max_tokens: int
) -> None:
    of = trajectories(rows)
    found = [sorted({int(of[row]) for row in rows_in(micro, rows)}) for micro in pack(rows, how, max_tokens)]
    assert len(set(itertools.chain(*found))) == sum(map(len, found)), "each in one micro-batch only"
    for micro, inside in zip(pack(rows, how, max_tokens), found, strict=True):
        assert len(micro.token_T) <= max_tokens or len(inside) == 1


@given(batches(), *WAYS)
def test_what_is_laid_is_the_trie_in_a_tree_each_row_when_packed_and_a_rectangle_when_padded(
    rows: Rows, how: Packing, max_tokens: int
) -> None:
    for micro in pack(rows, how, max_tokens):
        laid = [inputs(rows, row) for row in rows_in(micro, rows)]
        wanted = {
            "tree": trie(laid),
            "packed": sum(map(len, laid)),
            "padded": len(laid) * max(map(len, laid)),
        }
        assert len(micro.token_T) == wanted[how]


@given(batches(), st.integers(1, 40))
def test_B10_packed_rows_see_themselves_only_and_positions_begin_at_0_in_each(
    rows: Rows, max_tokens: int
) -> None:
    for micro in pack(rows, "packed", max_tokens):
        row_T = np.searchsorted(rows.offsets, micro.source_T, side="right") - 1
        assert micro.depth_T.tolist() == (micro.source_T - rows.offsets[row_T]).tolist()
        for at, path in paths(micro).items():
            assert set(row_T[path].tolist()) == {int(row_T[at])}
            assert micro.source_T[path].tolist() == list(
                range(rows.offsets[row_T[at]], micro.source_T[at] + 1)
            )


@given(batches(), st.integers(1, 40))
def test_packed_fills_micro_batches_so_that_no_two_would_fit_into_one(rows: Rows, max_tokens: int) -> None:
    sizes = [len(micro.token_T) for micro in pack(rows, "packed", max_tokens)]
    assert all(one + other > max_tokens for one, other in itertools.combinations(sizes, 2))


def test_leaves_of_a_trajectory_that_sort_far_apart_share_with_what_lies_beside_each() -> None:
    """Two trajectories of two leaves, the second leaf of a sub-agent with a prompt of its own."""
    tokens = [[1, 1, 5, 0], [9, 9, 6, 0], [1, 1, 7, 0], [9, 9, 8, 0]]
    rows = make_rows(tokens, [[0, 0, 1, 1]] * 4)._replace(trajectory=np.array([0, 0, 1, 1]))
    (micro,) = pack(rows, "tree", 100)
    assert len(micro.token_T) == (2 + 1 + 1) * 2
    assert [len(m.token_T) for m in pack(rows, "tree", 7)] == [6, 6]
    assert [len(m.token_T) for m in pack(rows._replace(trajectory=None), "tree", 7)] == [4, 4]


def test_a_tree_is_cut_between_groups_where_one_fits_and_a_prompt_is_laid_once() -> None:
    """Three groups of a prompt of 100 and four rows of 50: 300 positions each, of which two and a half would fit."""
    tokens = [[g] * 100 + [9 + i] * 51 for g in range(3) for i in range(4)]
    rows = make_rows(tokens, [[False] * 100 + [True] * 51] * 12)
    assert [len(m.token_T) for m in pack(rows, "tree", 750)] == [300, 600]
    halves = [len(m.token_T) for m in pack(rows, "tree", 200)]
    assert halves == [200] * 6  # each group in two, its prompt twice


def fewest(units: list[list[tuple[int, ...]]], max_tokens: int) -> float:
    """What the cheapest way to cut a line of units costs, by trying all: positions, and 64 a part."""
    if not units:
        return 0
    ways = []
    for n in range(1, len(units) + 1):
        size = trie([row for unit in units[:n] for row in unit])
        if n == 1 or size <= max_tokens:
            ways.append(size + 64 + fewest(units[n:], max_tokens))
    return min(ways)


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=8), max_size=8), st.integers(1, 20))
def test_no_other_cuts_of_rows_in_lexicographic_order_lay_less(
    tokens: list[list[int]], max_tokens: int
) -> None:
    rows = make_rows(tokens, [[False] * (len(row) - 1) + [True] for row in tokens])
    micros = pack(rows, "tree", max_tokens)
    line = sorted(tuple(row[:-1]) for row in tokens)
    assert positions(micros) + 64 * len(micros) == fewest([[row] for row in line], max_tokens)


@given(batches(), *WAYS, st.integers(0, 12))
def test_B4_ranks_with_fewer_micro_batches_get_ones_that_predict_nothing(
    rows: Rows, how: Packing, max_tokens: int, number: int
) -> None:
    own = pack(rows, how, max_tokens)
    found = fill(own, number, how)
    assert found[: len(own)] == own
    assert len(found) == max(len(own), number)
    for micro in found[len(own) :]:
        assert (len(micro.token_T), len(micro.predictor_U), len(micro.source_N)) == (1, 0, 0)
        assert micro.source_T.tolist() == [-1]
        assert set(paths(micro)) == {0}
        assert bool(micro.buckets) == (how != "padded")
    assert positions(found) == positions(own) + len(found) - len(own)


# --- rows --------------------------------------------------------------------------------------------------------


def described(rows: Rows) -> list[tuple[object, ...]]:
    """All that each row has."""
    ids = [None] * (len(rows.offsets) - 1) if rows.trajectory is None else rows.trajectory.tolist()
    out = []
    for row, (start, stop) in enumerate(itertools.pairwise(rows.offsets.tolist())):
        columns = [rows.tokens, rows.mask, *rows.fields.values(), *rows.side.values()]
        columns += [] if rows.recorded is None else [rows.recorded]
        out.append((ids[row], *(values[start:stop].tobytes() for values in columns)))
    return out


@given(batches(), st.randoms(use_true_random=False))
def test_B6_rows_are_taken_with_all_that_they_have_and_come_back_in_order(rows: Rows, random: object) -> None:
    n, total = len(rows.offsets) - 1, len(rows.tokens)
    routed = np.arange(total * 4, dtype=np.uint8).reshape(total, 2, 2)
    rows = rows._replace(side={"routed_experts": routed}, recorded=np.arange(total) % 3 > 0)
    order = list(range(n))
    random.shuffle(order)  # type: ignore[attr-defined]
    taken = take(rows, order)
    assert described(taken) == [described(rows)[i] for i in order]
    back = take(taken, np.argsort(order))
    assert described(back) == described(rows)
    assert back.offsets.tolist() == rows.offsets.tolist()
    assert back.tokens.dtype == rows.tokens.dtype


def test_rows_name_their_trajectories_one_integer_each() -> None:
    rows = make_rows([[1, 2], [3, 4], [1, 2]], [[0, 1]] * 3)
    check_rows(rows._replace(trajectory=np.array([7, 7, -3])), vocabulary=10, context=4)
    for wrong in (np.array([1, 2]), np.array([[1, 2, 3]]), np.array([1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match=r"trajectory must be integers \[3\], one a row, not"):
            check_rows(rows._replace(trajectory=wrong), vocabulary=10, context=4)
