"""What was recorded of a token stays beside it, however rows are packed; rows that differ in it share no position."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.learners.pack import Packing, pack, positions
from flowgraph.learners.protocol import Rows
from flowgraph.learners.rows import check_rows
from flowgraph.learners.side import differs, lay, lay_positions
from tests.unit.packed import PACKINGS, make_rows, paths

LAYERS, TOP_K, INDEX_TOP_K = 2, 2, 3
ANY = (st.sampled_from(PACKINGS), st.integers(1, 40))


@st.composite
def recorded_batches(draw: st.DrawFn) -> Rows:
    """Few tokens and few choices, so that rows agree in both, in one, in neither; holes in what was recorded."""
    row = st.lists(st.integers(0, 1), max_size=8)
    tokens = draw(st.lists(row, max_size=6))
    masks = [draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for r in tokens]
    rows = make_rows(tokens, [[False, *mask[1:]] if mask else [] for mask in masks])
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    total, kinds = len(rows.tokens), draw(st.integers(1, 3))
    own_T = np.arange(total) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))
    routed = random.integers(kinds, size=(total, LAYERS, TOP_K)).astype(np.uint8)
    indexed = random.integers(own_T[:, None, None] + 1, size=(total, LAYERS, INDEX_TOP_K)).astype(np.int32)
    if kinds == 1:
        indexed[:] = np.arange(INDEX_TOP_K)
        indexed = np.minimum(indexed, own_T[:, None, None]).astype(np.int32)
    recorded = random.random(total) < draw(st.sampled_from([0.5, 0.95, 1.0]))
    return rows._replace(side={"routed_experts": routed, "indexer_topk": indexed}, recorded=recorded)


def said(rows: Rows, at: npt.NDArray[Any]) -> list[Any]:
    """What is known of tokens: whether they were recorded, and what, where they were."""
    assert rows.recorded is not None
    there = rows.recorded[at][:, None, None]
    return [rows.recorded[at].tolist(), *(np.where(there, one[at], 0).tolist() for one in rows.side.values())]


@given(recorded_batches(), *ANY)
def test_X5_ids_and_side_rows_of_each_position_are_those_of_every_row_that_goes_through_it(
    rows: Rows, how: Packing, max_tokens: int
) -> None:
    check_rows(rows, vocabulary=2, context=8)
    for micro in pack(rows, how, max_tokens):
        way = paths(micro)
        for which, source in zip(micro.which_N, micro.source_N, strict=True):
            row = np.searchsorted(rows.offsets, source, side="right") - 1
            own = np.arange(rows.offsets[row], source)
            laid = micro.source_T[way[int(micro.predictor_U[which])]]
            assert rows.tokens[laid].tolist() == rows.tokens[own].tolist()
            assert said(rows, laid) == said(rows, own)


@given(recorded_batches(), *ANY)
def test_X5_padding_has_no_token_of_the_batch_and_is_given_no_choice(
    rows: Rows, how: Packing, max_tokens: int
) -> None:
    assert rows.recorded is not None
    for micro in pack(rows, how, max_tokens):
        real = micro.source_T >= 0
        assert micro.token_T[real].tolist() == rows.tokens[micro.source_T[real]].tolist()
        assert not micro.token_T[~real].any()
        assert real.all() or how == "padded"
        for values in rows.side.values():
            laid = lay(micro, values, rows.recorded)
            assert laid.given_T[real].tolist() == rows.recorded[micro.source_T[real]].tolist()
            assert not laid.given_T[~real].any()
            assert laid.values_TLK[laid.given_T].tolist() == values[micro.source_T[laid.given_T]].tolist()
            assert not laid.values_TLK[~laid.given_T].any()


@given(recorded_batches(), *ANY)
def test_X7_positions_in_a_channel_are_rebased_and_trimmed(rows: Rows, how: Packing, max_tokens: int) -> None:
    assert rows.recorded is not None
    values = rows.side["indexer_topk"]
    for micro in pack(rows, how, max_tokens):
        way = paths(micro)
        found = lay_positions(micro, values, rows.recorded)
        counts = found.kept_TLK.sum(axis=-1)
        assert (counts <= np.minimum(INDEX_TOP_K, micro.depth_T + 1)[:, None]).all()
        for t in range(len(micro.token_T)):
            own = [t] * INDEX_TOP_K
            for layer in range(LAYERS):
                at, kept = found.at_TLK[t, layer], found.kept_TLK[t, layer]
                wanted = list(dict.fromkeys(values[micro.source_T[t], layer].tolist()))
                assert at[kept].tolist() == ([way[t][j] for j in wanted] if found.given_T[t] else [])
                assert at[~kept].tolist() == own[: len(own) - kept.sum()]


@given(recorded_batches(), *ANY, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter_with_side_channels(
    rows: Rows, how: Packing, max_tokens: int, random: Any
) -> None:
    order = list(range(len(rows.offsets) - 1))
    random.shuffle(order)
    at = np.concatenate([np.arange(0), *(np.arange(rows.offsets[i], rows.offsets[i + 1]) for i in order)])
    lengths = [rows.offsets[i + 1] - rows.offsets[i] for i in order]
    shuffled = Rows(
        rows.tokens[at],
        np.cumsum([0, *lengths]),
        rows.mask[at],
        {},
        {name: values[at] for name, values in rows.side.items()},
        rows.recorded[at] if rows.recorded is not None else None,
    )
    for one, other in zip(pack(rows, how, max_tokens), pack(shuffled, how, max_tokens), strict=True):
        assert one.token_T.tolist() == other.token_T.tolist()
        assert one.depth_T.tolist() == other.depth_T.tolist()
        real = one.source_T >= 0
        assert said(rows, one.source_T[real]) == said(shuffled, other.source_T[real])


def siblings(first: list[int], second: list[int], recorded: list[bool] | None = None) -> Rows:
    """Two equal rows of four tokens, with one expert a token; the fourth is trained and never computed."""
    rows = make_rows([[7, 8, 9, 1]] * 2, [[False, False, False, True]] * 2)
    routed = np.array([*first, 0, *second, 0], np.uint8).reshape(-1, 1, 1)
    there = np.array([True, True, True, False, *(recorded or [True] * 3), False])
    return rows._replace(side={"routed_experts": routed}, recorded=there)


@pytest.mark.parametrize(
    ("rows", "laid"),
    [
        (siblings([1, 2, 3], [1, 2, 3]), 3),
        (siblings([1, 2, 3], [1, 2, 4]), 4),
        (siblings([1, 2, 3], [5, 2, 3]), 6),
        (siblings([1, 2, 3], [1, 2, 3], [True, False, True]), 5),
    ],
)
def test_a_tree_shares_a_prefix_only_as_far_as_its_routing_is_the_same(rows: Rows, laid: int) -> None:
    assert positions(pack(rows, "tree", 100)) == laid


def test_rows_of_one_routing_stand_beside_each_other_and_share_it() -> None:
    """Four equal rows under two routings: two positions a token, not four."""
    rows = make_rows([[7, 8, 1]] * 4, [[False, False, True]] * 4)
    routed = np.array([1, 2, 0, 3, 4, 0] * 2, np.uint16).reshape(-1, 1, 1)
    recorded = np.array([True, True, False] * 4)
    rows = rows._replace(side={"routed_experts": routed}, recorded=recorded)
    assert positions(pack(rows, "tree", 100)) == 4


def test_what_was_not_recorded_is_not_compared() -> None:
    rows = siblings([1, 2, 3], [1, 9, 3], [True, False, True])
    assert rows.recorded is not None
    rows.recorded[1] = False
    assert positions(pack(rows, "tree", 100)) == 3


def test_a_position_behind_its_token_is_refused_by_name() -> None:
    rows = make_rows([[1, 1, 1]], [[False, False, True]])
    indexed = np.array([0, 2, 0], np.int32).reshape(3, 1, 1)
    (micro,) = pack(rows, "tree", 10)
    with pytest.raises(ValueError, match="token 1, layer 0: position 2, expected 0 to the token's own, 1"):
        lay_positions(micro, indexed, np.ones(3, np.bool_))


def test_side_channels_that_do_not_fit_are_refused_by_name() -> None:
    rows = make_rows([[1, 1]], [[False, True]])
    good = np.zeros((2, LAYERS, TOP_K), np.uint8)

    def refusal(rows: Rows) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            check_rows(rows, vocabulary=2, context=8)
        return str(caught.value)

    missing = rows._replace(side={"routed_experts": good})
    assert "recorded must be bool[2] beside side channels; it is missing" in refusal(missing)
    there = missing._replace(recorded=np.ones(2, np.bool_))
    check_rows(there, vocabulary=2, context=8)
    assert "it is int64[2]" in refusal(there._replace(recorded=np.ones(2, np.int64)))  # type: ignore[arg-type]
    short = there._replace(side={"routed_experts": good[:1]})
    assert "side channel 'routed_experts' must be integers [2, layers, k], not uint8[1, 2, 2]" in refusal(
        short
    )
    floats = there._replace(side={"routed_experts": good.astype(np.float32)})  # type: ignore[dict-item]
    assert "not float32[2, 2, 2]" in refusal(floats)


def test_choices_differ_as_sets() -> None:
    one = np.array([[[1, 2], [1, 2]]])
    assert differs(one, np.array([[[2, 1], [1, 3]]])).tolist() == [[False, True]]
