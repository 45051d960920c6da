"""Rows go to ranks: each to one, evenly by cost, the dearest first."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.learners.partition import (
    cost,
    cut,
    imbalance,
    partition,
    reorder,
    split,
    split_steps,
    work,
)
from flowgraph.models.facts import ModelFacts, TensorFact, facts

COSTS = st.lists(st.integers(0, 50).map(float), max_size=40)


def dearest(costs: Sequence[float], parts: Sequence[Any]) -> float:
    return max(float(np.asarray(costs)[part].sum()) for part in parts)


def cheapest_way(costs: Sequence[float], parts: int) -> float:
    """Of the dearest part, over all ways to part the rows."""
    ways = itertools.product(range(parts), repeat=len(costs))
    return min(max(np.bincount(way, costs, minlength=parts)) for way in ways)


@given(COSTS, st.integers(1, 9), st.booleans())
def test_each_row_is_in_one_part_and_no_part_is_above_the_cap_of_equal_ones(
    costs: list[float], parts: int, equal: bool
) -> None:
    found = partition(costs, parts, equal=equal)
    assert len(found) == parts
    assert sorted(row for part in found for row in part.tolist()) == list(range(len(costs)))
    assert all((np.diff(part) > 0).all() for part in found)
    if len(costs) >= parts:
        assert all(len(part) for part in found)
    if equal:
        assert all(len(part) <= -(-len(costs) // parts) for part in found)


@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=7), st.integers(1, 3))
def test_the_dearest_part_keeps_grahams_bound(costs: list[float], parts: int) -> None:
    least = cheapest_way(costs, parts)
    assert least <= dearest(costs, partition(costs, parts)) <= (4 / 3 - 1 / (3 * parts)) * least + 1e-12


def test_512_log_normal_lengths_are_spread_over_8_parts_within_a_thousandth_and_a_millisecond() -> None:
    worst, seconds = 0.0, []
    for seed in range(20):
        lengths = np.clip(np.random.default_rng(seed).lognormal(6, 1, 512), 1, 16_384).astype(np.int64)
        costs = cost(lengths)
        began = time.perf_counter()
        found = partition(costs, 8, equal=True)
        seconds.append(time.perf_counter() - began)
        assert [len(part) for part in found] == [64] * 8
        worst = max(worst, imbalance(costs, found))
    assert worst <= 1.0001
    assert min(seconds) < 1e-3  # the least: what else runs here takes time from the others


def test_an_exchange_mends_what_longest_first_leaves_and_a_row_may_change_places_with_nobody() -> None:
    assert dearest([5, 5, 4, 4, 3, 3, 3], partition([5, 5, 4, 4, 3, 3, 3], 3)) == 9  # 11 longest first
    found = partition([8, 7, 6, 5, 4], 2, equal=True)
    assert dearest([8, 7, 6, 5, 4], found) == 15
    assert sorted(map(len, found)) == [2, 3]


def test_equal_rows_are_spread_evenly_the_first_ones_first_and_so_are_rows_of_no_cost() -> None:
    assert [part.tolist() for part in partition([1.0] * 6, 3)] == [[0, 3], [1, 4], [2, 5]]
    assert [part.tolist() for part in partition([0.0] * 4, 2)] == [[0, 2], [1, 3]]
    assert [part.tolist() for part in partition([], 2)] == [[], []]
    assert imbalance([], partition([], 2)) == 1


def test_costs_and_parts_that_mean_nothing_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="at least one part, not 0"):
        partition([1.0], 0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="row 1 costs"):
            partition([1.0, wrong], 2)


@given(COSTS)
def test_rows_are_ordered_from_the_dearest_to_the_cheapest_and_equal_ones_stay_as_they_stand(
    costs: list[float],
) -> None:
    assert reorder(costs).tolist() == sorted(range(len(costs)), key=lambda row: (-costs[row], row))


# --- what a row costs --------------------------------------------------------------------------------------------


def test_the_cost_of_a_row_is_linear_and_quadratic_in_its_length() -> None:
    assert cost([0, 1, 10], 2, 3).tolist() == [0, 5, 320]
    assert cost([3, 4]).tolist() == [3, 4]


def test_the_work_of_a_model_is_two_a_parameter_and_two_a_pair_of_tokens_and_width() -> None:
    small = facts("smollm2-135m")
    assert small is not None
    assert work(small) == (2 * small.parameters, 2 * 30 * 9 * 64)  # tied: the embedding is the head


def test_work_counts_no_embedding_beside_a_head_and_of_experts_the_chosen_ones() -> None:
    tensors = {
        "model.embed_tokens.weight": (100, 8),
        "lm_head.weight": (100, 8),
        "model.layers.0.mlp.experts.0.up_proj.weight": (8, 16),
        "model.layers.0.mlp.experts.1.up_proj.weight": (8, 16),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
    }
    model = ModelFacts(
        layers=1, hidden=8, heads=2, kv_heads=2, head_dim=4, vocab=100, max_position=64, experts=2, top_k=1,
        tensors=tuple(TensorFact(name, shape, "bfloat16") for name, shape in tensors.items()), moe_layers=1,
    )  # fmt: skip
    assert work(model) == (2 * (800 + 128 + 64), 2 * 1 * 8)


@pytest.mark.parametrize(
    ("model", "active"), [("qwen3-30b-a3b", 3.3e9), ("deepseek-v3", 37e9), ("kimi-k2", 32e9)]
)
def test_the_linear_work_of_mixtures_of_experts_is_that_of_the_active_parameters_that_are_published(
    model: str, active: float
) -> None:
    known = facts(model)
    assert known is not None
    # Of the published numbers some count the embedding too, 0.3e9 of the smallest.
    assert work(known).linear / 2 == pytest.approx(active, rel=0.1)


# --- groups that share a prompt ----------------------------------------------------------------------------------


def paid(costs: Any, shared: Any, group: Any, rows: Any) -> float:
    """What a part pays for its rows, by hand: each group's longest prompt once."""
    own = sum(costs[row] - shared[row] for row in rows)
    return float(
        own + sum(max(shared[row] for row in rows if group[row] == g) for g in {group[r] for r in rows})
    )


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], list[float], list[int]]:
    costs: list[float] = []
    shared: list[float] = []
    group: list[int] = []
    for uid in range(draw(st.integers(0, 6))):
        prompt = draw(st.integers(0, 20))
        for response in draw(st.lists(st.integers(0, 20), min_size=1, max_size=6)):
            costs.append(float(prompt + response))
            shared.append(float(prompt))
            group.append(uid)
    order = draw(st.permutations(range(len(costs))))
    return [costs[i] for i in order], [shared[i] for i in order], [group[i] for i in order]


@given(groups(), st.integers(1, 5))
def test_a_split_has_each_row_once_and_is_no_dearer_than_whole_groups_or_single_rows(
    case: tuple[list[float], list[float], list[int]], parts: int
) -> None:
    costs, shared, group = case
    found = split(costs, parts, group=group, shared=shared)
    assert sorted(row for part in found for row in part.tolist()) == list(range(len(costs)))
    assert len(found) == parts
    worst = max(paid(costs, shared, group, part.tolist()) for part in found)
    uids = sorted(set(group))
    whole = [paid(costs, shared, group, [r for r, g in enumerate(group) if g == uid]) for uid in uids]
    together = partition(whole, parts)
    assert worst <= dearest(whole, together) + 1e-9
    alone = [paid(costs, shared, group, part.tolist()) for part in partition(costs, parts)]
    assert worst <= max(alone) + 1e-9


def test_whole_groups_stay_together_where_that_balances_and_are_cut_where_it_does_not() -> None:
    group, shared = np.repeat(np.arange(4), 8), np.full(32, 90.0)
    even = split(np.full(32, 100.0), 2, group=group, shared=shared)
    assert [sorted(set(group[part].tolist())) for part in even] == [[0, 2], [1, 3]]
    thirds = split(np.full(32, 100.0), 3, group=group, shared=np.full(32, 10.0))
    assert sorted(map(len, thirds)) == [10, 11, 11]
    assert [len(set(group[part].tolist())) for part in thirds] == [2, 2, 2]


def test_without_groups_a_split_is_a_partition() -> None:
    costs = [5.0, 4.0, 3.0, 2.0]
    assert [part.tolist() for part in split(costs, 2)] == [part.tolist() for part in partition(costs, 2)]


@given(groups(), st.integers(1, 4), st.integers(1, 3))
def test_each_step_of_a_batch_is_split_as_well_as_it_is_by_itself(
    case: tuple[list[float], list[float], list[int]], parts: int, steps: int
) -> None:
    costs, shared, group = case
    steps = max(1, min(steps, len(costs)))
    found = split_steps(costs, parts, steps, group=group, shared=shared)
    assert sorted(row for part in found for row in part.tolist()) == list(range(len(costs)))
    assert all(part.tolist() == sorted(part.tolist()) for part in found)
    of = cut(len(costs), steps)
    for step in range(steps):
        rows = np.flatnonzero(of == step)
        own = [np.array(values)[rows] for values in (costs, shared, group)]
        alone = split(own[0], parts, group=own[2], shared=own[1])
        assert sorted(map(len, alone)) == sorted(int((of[part] == step).sum()) for part in found)
        worst = max(paid(costs, shared, group, part[of[part] == step].tolist()) for part in found)
        assert worst == pytest.approx(max(paid(*map(list, own), part.tolist()) for part in alone))


def test_no_part_waits_for_a_step_in_which_another_has_all_groups() -> None:
    """8 prompts of 8 samples in two steps on two ranks: whole groups would lie as they fall."""
    random = np.random.default_rng(0)
    group = np.repeat(np.arange(8), 8)
    shared = random.integers(30, 48, 8)[group].astype(float)
    costs = shared + random.integers(2, 8, 64)
    of, found = cut(64, 2), split_steps(costs, 2, 2, group=group, shared=shared)
    for step in range(2):
        paid_by = [
            paid(costs.tolist(), shared.tolist(), group.tolist(), p[of[p] == step].tolist()) for p in found
        ]
        assert max(paid_by) / np.mean(paid_by) < 1.1
