"""The staleness bound: what it is made of, and that no order of events exceeds it where rows finish in order."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from flowgraph import Row
from flowgraph.passes.pipeline import load
from flowgraph.passes.rates import Rate, rates
from flowgraph.passes.staleness import Staleness, queue_depth, staleness
from hops.batch import Counter, oldest_first
from hops.buffer import Ready, ready
from hops.dispatch import InFlight, watermark
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
    assert (found.n, found.b, found.q, found.o) == ((lag + 1) * 6, 6, lag, int(lag > 0))
    assert found.admitted == (lag + 1) * 6
    assert found.formula == 2 * lag + found.o
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
    for lag, depth in ((1, 0), (2, 1), (4, 3)):
        graph = good(tmp_path, hops.replace("max_lag: 1", f"max_lag: {lag}"))
        assert queue_depth(graph, graph.nodes["batch"]) == depth
        found = staleness(graph)
        assert found is not None
        assert found.bound == lag
    assert codes(tmp_path, hops.replace("max_lag: 1", "max_lag: 0")) == []


class Ring(msgspec.Struct):
    """The three folds of hops/, driven by hand: what is in flight, what waits to be trained, and the lags so far."""

    groups: int
    samples: int
    max_lag: int
    capacity: int | None
    target: int | None
    depth: int
    dispatch: InFlight = msgspec.field(default_factory=InFlight)
    buffer: Ready = msgspec.field(default_factory=Ready)
    batch: Counter = msgspec.field(default_factory=Counter)
    in_flight: list[Row] = []
    made: int = 0
    trained: int = 0
    version: int = 0
    uid: int = 0
    lags: list[int] = []

    def sizes(self) -> dict[str, int]:
        return {"groups": self.groups, "samples": self.samples, "max_lag": self.max_lag}

    def send(self, group: Row | None = None, **event: object) -> int:
        free = ready(self.buffer, None, None, **self.sizes(), capacity=self.capacity).free
        done = watermark(
            self.dispatch, group, event.get("finished"), self.version, free, event.get("dropped"),
            **self.sizes(), steps=10**6, seed=0, target=self.target,
        )  # fmt: skip
        for request in done.request:
            self.in_flight.append(Row("trajectory", int(request.trajectory), request.parents, request.tag))
        return len(done.request)

    def settle(self) -> None:
        """Until no fold has anything to do."""
        busy = True
        while busy:
            busy = False
            if self.dispatch.group is None:
                self.uid += 1
                busy |= self.send(Row("group", self.uid)) > 0
            busy |= self.send() > 0
            if self.made - self.trained > self.depth:
                continue
            shown = ready(self.buffer, None, None, **self.sizes(), capacity=self.capacity).ready
            chosen = oldest_first(self.batch, shown, **self.sizes())
            for drop in chosen.dropped:
                ready(self.buffer, None, None, drop, **self.sizes(), capacity=self.capacity)
                self.send(dropped=drop)
            for step in chosen.leaves:
                row = Row("step", self.made, step.parents)
                ready(self.buffer, None, row, **self.sizes(), capacity=self.capacity)
                self.made += 1
                self.lags.append(int(step.lag.max()))
            busy |= bool(chosen.leaves or chosen.dropped)

    def finish(self, at: int) -> None:
        row = self.in_flight.pop(at)
        ready(self.buffer, row, None, **self.sizes(), capacity=self.capacity)
        self.send(finished=row)

    def train(self, every: int) -> None:
        self.trained += 1
        self.version = self.trained // every * every


def run(ring: Ring, rng: random.Random, steps: int, every: int, in_order: bool) -> int:
    """The largest lag of any trained row, over a random order of finishes and trainings."""
    eager = rng.random()
    while ring.trained < steps:
        ring.settle()
        trainable = ring.made > ring.trained
        if trainable and (not ring.in_flight or rng.random() < eager):
            ring.train(every)
        else:
            assert ring.in_flight, "nothing can happen any more"
            ring.finish(0 if in_order else rng.randrange(len(ring.in_flight)))
    return max(ring.lags)


def test_no_order_of_events_exceeds_the_formula_and_some_reach_it() -> None:
    """The gate is wide open, so that the capacities alone bound the lag."""
    reached = 0
    for seed in range(150):
        rng = random.Random(seed)
        groups, samples, depth, every = (
            rng.randint(1, 3),
            rng.randint(1, 3),
            rng.randint(0, 2),
            rng.randint(1, 3),
        )
        b = groups * samples
        capacity = b + rng.randint(0, 2 * b)
        ring = Ring(groups, samples, 1000, capacity, None, depth)
        bound = Staleness("batch", capacity, b, depth, 1, every - 1).bound
        lag = run(ring, rng, 12, every, in_order=True)
        assert lag <= bound, (seed, lag, bound)
        reached += lag == bound
    assert reached > 0


def test_no_order_of_events_exceeds_the_gate_and_some_reach_it() -> None:
    reached = 0
    for seed in range(150):
        rng = random.Random(seed)
        lag = rng.randint(0, 3)
        ring = Ring(rng.randint(1, 3), rng.randint(1, 3), lag, None, None, rng.randint(0, lag))
        largest = run(ring, rng, 12, rng.randint(1, lag + 1), in_order=True)
        assert largest <= lag, (seed, largest, lag)
        reached += largest == lag > 0
    assert reached > 0


def test_under_any_order_of_finishes_no_trained_row_exceeds_max_lag() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        lag = rng.randint(0, 3)
        ring = Ring(rng.randint(1, 3), rng.randint(1, 3), lag, None, None, lag)
        assert run(ring, rng, 12, 1, in_order=False) <= lag


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
    assert str(found["rollout"]) == "6 to … trajectory"
    loaded = load(TOY, ["dims.leaf={mean: 1.5, max: 2}", "hops.train.in.lag={from: batch, every: 2}"])
    assert loaded.graph is not None
    more = rates(loaded.graph)
    assert more["reward"] == Rate("leaf", 6, 12)
    assert more["train"] == more["sync"] == Rate("step", 0.5, 0.5)
