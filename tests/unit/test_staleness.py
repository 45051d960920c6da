"""The staleness bound: what it is made of. That no order of events exceeds it is in tests/runtime/test_staleness.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgraph.passes.pipeline import load
from flowgraph.passes.rates import Rate, rates
from flowgraph.passes.staleness import Staleness, queue_depth, staleness
from tests.unit.graphs import RING, SMALL, codes, good

TOY = str(Path(__file__).parents[1] / "runtime/toy.yaml")


def of(*overrides: str) -> Staleness:
    loaded = load(TOY, overrides)
    assert loaded.graph is not None
    assert not loaded.diagnostics, loaded.diagnostics
    found = staleness(loaded.graph)
    assert found is not None
    return found


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_gate_of_dispatch_proves_any_max_lag_with_the_capacities_that_are_derived(lag: int) -> None:
    found = of(f"hops.dispatch.in.version.max_lag={lag}")
    assert (found.n, found.b, found.q, found.o) == ((lag + 1) * 6, 6, min(1, lag), int(lag > 0))
    assert found.admitted == (lag + 1) * 6
    assert found.formula == lag + found.q + found.o
    assert found.bound == lag


def test_the_formula_counts_what_waits_what_trains_and_what_is_not_synced() -> None:
    assert Staleness("batch", n=13, b=6, q=2, o=1, sync=1).bound == 2 + 2 + 1 + 1
    assert Staleness("batch", n=13, b=6, q=2, o=1, admitted=12).bound == 1


def test_a_smaller_buffer_makes_rows_no_staler() -> None:
    found = of("hops.dispatch.in.version.max_lag=2", "hops.buffer.with.capacity=6", "hops.batch.capacity=0")
    assert (found.n, found.formula, found.bound) == (6, 1, 1)


def test_a_ring_that_declares_nothing_has_no_bound(tmp_path: Path) -> None:
    assert staleness(good(tmp_path)) is None


def test_the_queue_is_derived_from_what_max_lag_leaves(tmp_path: Path) -> None:
    wrong = SMALL.replace("small", "wrong")
    hops = RING.replace(f"{SMALL}.split_by_version, in: {{", f"{wrong}.split_while_free, in: {{free: pool, ")
    hops = hops.replace("small.batch, in: {trajectory: split}", "small.batch_of_waiting, in: {waiting: pool}")
    hops += f"  pool: {{use: {wrong}.pool, in: {{trajectory: split}}, with: {{places: 8}}}}\n"
    for lag, depth, bound in ((1, 0, 1), (2, 1, 2), (4, 1, 2)):
        graph = good(tmp_path, hops.replace("max_lag: 1", f"max_lag: {lag}"))
        assert queue_depth(graph, graph.nodes["batch"]) == depth
        found = staleness(graph)
        assert found is not None
        assert found.bound == bound
    assert codes(tmp_path, hops.replace("max_lag: 1", "max_lag: 0")) == []


def test_rates_are_intervals_where_data_decides() -> None:
    graph = load(TOY).graph
    assert graph is not None
    found = rates(graph)
    inf = float("inf")
    assert found["dataset"] == Rate("group", 2, inf)
    assert found["rollout"] == found["buffer"] == Rate("trajectory", 6, inf)
    assert found["batch"] == found["train"] == Rate("step", 1, 1)
    assert found["reward"] == Rate("leaf", 12, 12)
    assert "eval" not in found
    assert str(found["rollout"]) == "at least 6 trajectories a step"
    loaded = load(TOY, ["dims.leaf={mean: 1.5, max: 2}", "hops.train.in.lag={from: batch, every: 2}"])
    assert loaded.graph is not None
    more = rates(loaded.graph)
    assert more["reward"] == Rate("leaf", 6, 12)
    assert more["train"] == more["sync"] == Rate("step", 0.5, 0.5)


def test_a_bound_says_what_it_is_made_of() -> None:
    assert Staleness("batch", 24, 8, 1, 1, 1, 24).parts == (
        "2 in flight and ready + 1 queued + 1 in training + 1 unsynced; dispatch admits 2"
    )
    assert Staleness("batch", 8, 8, 0, 0).parts == "nothing waits"
    assert Staleness("batch", None, 8, 0, 1, 0, 16).parts == "dispatch admits 1"
