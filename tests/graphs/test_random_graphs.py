"""For random graphs: what passes change is bytes, never a bit, and the bytes are those that were predicted.

Hops are drawn with their ports, promises and owners; every value is a hash of all that its hop read, so that one wrong
bit anywhere shows in the fingerprints that every hop leaves in metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgraph import Derivable
from flowgraph.passes.rewrite import PASSES
from flowgraph.passes.sizes import rows_per_step
from flowgraph.plan.measured import Measured
from flowgraph.plan.plan import Plan, from_json
from flowgraph.plan.predict import predict
from flowgraph.runtime.run import run_graph
from tests.graphs.content import Col, mixed
from tests.graphs.random_graphs import rings
from tests.graphs.rings import Ring, graph_of
from tests.graphs.small_rings import BOUNDS, PROMPT, TILED, TOKENS, TRUTH, VALID, one, sampler, small, tokens
from tests.runtime.harness import steps, summary

SOME = st.sets(st.sampled_from(sorted(PASSES)))


def quick(examples: int) -> settings:
    """The same examples in every run, and however long one takes."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class Runs:
    """Runs of one ring in this process, each in a directory of its own, which is what they return."""

    def __init__(self, ring: Ring, directory: Path) -> None:
        self.ring, self.directory = ring, directory
        self.graph, self.content = graph_of(ring, directory)

    def __call__(self, off: Collection[str] = (), verify: bool = False) -> str:
        done = run_graph(
            self.graph, self.content, executor="inproc", runs=str(self.directory / "runs"), live=False,
            off=off, verify=verify,
        )  # fmt: skip
        assert done.steps == self.ring.steps
        return done.directory


def measured(directory: str) -> tuple[Plan, Measured]:
    plan = from_json((Path(directory) / "plan.json").read_bytes())
    return plan, msgspec.json.decode((Path(directory) / "seams.json").read_bytes(), type=Measured)


# --- what is checked of a run ----------------------------------------------------------------------------------


def bytes_are_as_predicted(directory: str) -> None:
    """At the lengths that were recorded, to the byte; and no port ever reads more than its bound.

    With overlap, groups are made ahead of the steps that they are for.
    """
    plan, found = measured(directory)
    ports = {f"{hop.name}.{read.port}" for hop in plan.hops.values() for read in hop.reads}
    assert predict(plan, found.lengths) == {port: found.read.get(port, 0) for port in ports}
    ledger = summary(directory)["ledger"]
    made = sum(v if isinstance(v, int) else sum(v.values()) for k, v in ledger.items() if k != "dispatched")
    assert made == ledger["dispatched"]
    batches = ledger["dispatched"] / rows_per_step("trajectory", plan.dims)
    for seam in plan.seams:
        for field in seam.fields if plan.max_lag == 0 or plan.hops[seam.reader].rows != "group" else ():
            assert found.read.get(f"{seam.reader}.{field.port}", 0) <= field.max_bytes * batches, field


def bytes_are_as_priced(directory: str) -> None:
    """Where every dim has one size: what was priced before the run, to the byte."""
    plan, found = measured(directory)
    for seam in plan.seams:
        for field in seam.fields:
            port = f"{seam.reader}.{field.port}"
            assert found.read.get(port, 0) == pytest.approx(field.mean_bytes * found.steps), (port, field)
    for hop in plan.hops.values():
        rows = rows_per_step(hop.rows, plan.dims) * found.steps / hop.every
        for column in hop.written:
            wrote = found.wrote.get(f"{hop.name}.{column.name}", 0)
            assert wrote == pytest.approx(column.mean_bytes * rows), (hop.name, column)
    assert found.driver_bytes == pytest.approx(plan.driver_bytes * found.steps)


def differences(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    found = [(k, a.get(k), b.get(k)) for a, b in zip(one, two, strict=True) for k in a | b]
    return [(k, a, b) for k, a, b in found if a != b]


def passes_change_bytes_only(ring: Ring, off: Collection[str], directory: Path) -> None:
    run = Runs(ring, directory)
    plain, *others = made = [run(off=PASSES), run(), run(off=off), run(verify=True)]
    for other in others:
        assert differences(steps(other), steps(plain)) == []
    for ran in made:
        bytes_are_as_predicted(ran)
        if ring.full:
            bytes_are_as_priced(ran)


# --- what once went wrong --------------------------------------------------------------------------------------

FLAG = Col("flag", "array", "", "bool")
N = Col("n", "array", "", "float32")
MARK = Col("mark", "array", "", "int64", (Derivable(mixed, ("flag",)),))
X = tokens("x")
SUM_OF_X = tokens("sum_of_x", Derivable(mixed, ("x",)), dtype="int64")
SMALL = {
    "bounds that nobody reads still say how many leaves a trajectory has": small(
        sampler(BOUNDS, TOKENS), one("a", "batch.truth@leaf batch.lag"), source=(PROMPT, TRUTH), full=False
    ),
    "a hop of a group reads one value a leaf of what its group has just sampled": small(
        sampler(BOUNDS),
        one("t", "sampler.truth@leaf", rows="trajectory", owner="rollout"),
        source=(PROMPT, TRUTH),
    ),
    "what a group hands on is not derived again": small(
        sampler(BOUNDS, TOKENS), one("a", "batch.bounds", X, SUM_OF_X), one("b", "a.x a.sum_of_x")
    ),
    "a column that two ports read is counted once": small(
        sampler(BOUNDS, TOKENS), one("a", "batch.tokens sampler.tokens"), one("b", "batch.tokens")
    ),
    "what a column of a group is derived of is read once a group": small(
        sampler(BOUNDS),
        one("a", "batch.flag", N),
        one("b", "batch.flag batch.mark a.n"),
        source=(PROMPT, FLAG, MARK),
    ),
    "each column of a read is charged to the driver by where it lies": small(
        sampler(BOUNDS, VALID),
        one("t", "sampler.valid sampler.bounds", TILED, rows="trajectory", owner="driver"),
        one("a", "batch.tiled batch.lag"),
        response=40,
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_rings_on_which_a_pass_once_went_wrong(name: str, tmp_path: Path) -> None:
    passes_change_bytes_only(SMALL[name], ["place", "defer"], tmp_path)


# --- the properties --------------------------------------------------------------------------------------------


@quick(25)
@given(rings(full=True), SOME)
def test_fixed_shapes_cost_what_they_were_priced_at_and_no_pass_changes_a_bit(
    tmp_path_factory: pytest.TempPathFactory, ring: Ring, off: set[str]
) -> None:
    passes_change_bytes_only(ring, off, tmp_path_factory.mktemp("ring"))


@quick(35)
@given(rings(), SOME)
def test_ragged_data_costs_what_its_lengths_say_and_no_pass_changes_a_bit(
    tmp_path_factory: pytest.TempPathFactory, ring: Ring, off: set[str]
) -> None:
    passes_change_bytes_only(ring, off, tmp_path_factory.mktemp("ring"))


@quick(20)
@given(st.integers(1, 2).flatmap(lambda lag: rings(max_lag=lag)), SOME)
def test_with_overlap_rows_are_conserved_and_bytes_are_as_predicted(
    tmp_path_factory: pytest.TempPathFactory, ring: Ring, off: set[str]
) -> None:
    run = Runs(ring._replace(steps=4), tmp_path_factory.mktemp("ring"))
    bytes_are_as_predicted(run(off=off))


@pytest.mark.slow
@pytest.mark.timeout(900)
@quick(300)
@given(st.booleans().flatmap(lambda full: rings(full=full)), SOME)
def test_no_pass_changes_a_bit_of_many_graphs(
    tmp_path_factory: pytest.TempPathFactory, ring: Ring, off: set[str]
) -> None:
    passes_change_bytes_only(ring, off, tmp_path_factory.mktemp("ring"))
