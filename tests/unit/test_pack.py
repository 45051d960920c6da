"""Rows become micro-batches in which every masked token is predicted from exactly its row's prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.learners.pack import Micro, Packing, pack, positions
from flowgraph.learners.protocol import Rows
from flowgraph.learners.rows import check_rows
from tests.unit.packed import PACKINGS, make_rows, paths


def group(prompt: Sequence[int], *responses: Sequence[int]) -> Rows:
    """One prompt and its sampled responses, all trained on."""
    return make_rows(
        [[*prompt, *response] for response in responses],
        [[False] * len(prompt) + [True] * len(response) for response in responses],
    )


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Few token values, so that prefixes are shared in all kinds of ways; masks with holes; rows of no mask."""
    row = st.lists(st.integers(0, 2), max_size=9)
    tokens = draw(st.lists(row, max_size=7))
    masks = [draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for r in tokens]
    return make_rows(tokens, [[False, *mask[1:]] if mask else [] for mask in masks])


def seen(micro: Micro) -> dict[int, list[int]]:
    """position → the tokens that attention lets it see, itself last."""
    return {at: micro.token_T[path].tolist() for at, path in paths(micro).items()}


@given(batches(), st.sampled_from(PACKINGS), st.integers(1, 40))
def test_each_masked_token_is_predicted_once_from_its_rows_prefix(
    rows: Rows, how: Packing, max_tokens: int
) -> None:
    found: list[int] = []
    for micro in pack(rows, how, max_tokens):
        visible = seen(micro)
        assert (np.diff(micro.which_N) >= 0).all()
        for which, target, source in zip(micro.which_N, micro.target_N, micro.source_N, strict=True):
            row = np.searchsorted(rows.offsets, source, side="right") - 1
            assert visible[int(micro.predictor_U[which])] == rows.tokens[rows.offsets[row] : source].tolist()
            assert target == rows.tokens[source]
            found.append(int(source))
    assert sorted(found) == np.flatnonzero(rows.mask).tolist()


@given(batches(), st.sampled_from(PACKINGS), st.integers(1, 40))
def test_micro_batches_keep_the_token_cap_and_B3_a_longer_row_stands_alone(
    rows: Rows, how: Packing, max_tokens: int
) -> None:
    for micro in pack(rows, how, max_tokens):
        owners = np.searchsorted(rows.offsets, micro.source_N, side="right")
        rows_inside = {rows.tokens[rows.offsets[o - 1] : rows.offsets[o]].tobytes() for o in owners}
        assert len(micro.token_T) <= max_tokens or len(rows_inside) == 1


@given(batches(), st.sampled_from(PACKINGS), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: Rows, how: Packing, max_tokens: int, random: object) -> None:
    order = list(range(len(rows.offsets) - 1))
    random.shuffle(order)  # type: ignore[attr-defined]
    parts = [slice(rows.offsets[i], rows.offsets[i + 1]) for i in order]
    shuffled = make_rows([rows.tokens[p].tolist() for p in parts], [rows.mask[p].tolist() for p in parts])
    for one, other in zip(pack(rows, how, max_tokens), pack(shuffled, how, max_tokens), strict=True):
        assert one.token_T.tolist() == other.token_T.tolist()
        assert one.depth_T.tolist() == other.depth_T.tolist()


def test_a_tree_holds_a_shared_prompt_once_and_no_last_token() -> None:
    rows = group([7, 8, 9], [1, 2, 3], [4, 5, 6])
    (micro,) = pack(rows, "tree", 100)
    assert positions([micro]) == 3 + 2 + 2
    assert len(micro.predictor_U) == 1 + 2 + 2  # the prompt's last position predicts both first tokens
    assert positions(pack(rows, "padded", 100)) == 2 * (3 + 2)


def test_a_tree_holds_equal_rows_and_equal_beginnings_once() -> None:
    (micro,) = pack(group([7, 8], [1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5, 6]), "tree", 100)
    assert positions([micro]) == 2 + 2 + 1
    assert len(micro.source_N) == 12


def test_a_forked_leaf_shares_the_trunk_that_only_the_first_leaf_trains() -> None:
    trunk = [1, 2, 3, 4]
    rows = make_rows([[*trunk, 5, 6], [*trunk, 7, 8]], [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    (micro,) = pack(rows, "tree", 100)
    assert positions([micro]) == 4 + 1 + 1
    assert len(micro.source_N) == 4 + 2


@pytest.mark.parametrize("how", PACKINGS)
def test_B7_an_empty_response_or_an_empty_row_contributes_nothing(how: Packing) -> None:
    rows = make_rows([[1, 2], [], [1, 2, 3]], [[0, 0], [], [0, 0, 1]])
    check_rows(rows, vocabulary=4, context=8)
    (micro,) = pack(rows, how, 100)
    assert micro.source_N.tolist() == [4]
    assert pack(make_rows([[1, 2]], [[0, 0]]), how, 100) == []
    assert pack(make_rows([], []), how, 100) == []


def test_tokens_behind_the_last_masked_one_are_left_out() -> None:
    for how in PACKINGS:
        assert positions(pack(make_rows([[1, 2, 3, 4, 5]], [[0, 1, 0, 0, 0]]), how, 100)) == 1


def test_a_long_row_is_cut_into_runs_that_see_all_before_them() -> None:
    length = 300
    (micro,) = pack(make_rows([[i % 5 for i in range(length)]], [[0] + [1] * (length - 1)]), "tree", 10)
    assert sum(bucket.query_RQ.shape[0] for bucket in micro.buckets) == 3
    assert [len(path) for path in dict(sorted(seen(micro).items())).values()] == list(range(1, length))


def refusal(rows: Rows) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_rows(rows, vocabulary=10, context=4)
    return str(caught.value)


def test_B7_a_row_without_a_prompt_is_refused_by_name() -> None:
    assert refusal(make_rows([[1, 2], [3, 4]], [[0, 1], [1, 1]])).startswith("row 1: no prompt token")


def test_bad_offsets_tokens_and_lengths_name_the_row() -> None:
    good = make_rows([[1, 2], [3, 4]], [[0, 1], [0, 1]])
    check_rows(good, vocabulary=10, context=4)
    assert "row 1: its offsets 3, 2" in refusal(good._replace(offsets=np.array([0, 3, 2, 4])))
    assert "from 0 to the number of tokens, 4" in refusal(good._replace(offsets=np.array([0, 2])))
    assert "row 1: token id 10 is not below 10" in refusal(make_rows([[1], [3, 10]], [[0], [0, 1]]))
    assert "row 0: token id -1" in refusal(make_rows([[1, -1]], [[0, 1]]))
    assert "row 0: 5 tokens exceed" in refusal(make_rows([[1] * 5], [[0] * 5]))
    assert "mask must be bool[4]" in refusal(good._replace(mask=np.array([0, 1, 0, 1])))


def test_a_field_must_fit_and_be_finite_where_it_is_read() -> None:
    tokens, masks = [[1, 2], [3, 4]], [[0, 1], [0, 1]]
    nan = np.float32("nan")
    assert "row 1: field 'advantages' is nan at token 3" in refusal(
        make_rows(tokens, masks, advantages=np.array([0, 0, 0, nan], np.float32))
    )
    check_rows(
        make_rows(tokens, masks, advantages=np.array([nan, 0, nan, 0], np.float32)), vocabulary=10, context=4
    )
    assert "field 'uid' must have one value per token (4), not shape (2,)" in refusal(
        make_rows(tokens, masks, uid=np.array([1, 2]))
    )
