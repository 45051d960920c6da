"""The plan of a graph: sizes, bindings and seams, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest

from flowgraph import Tensors
from flowgraph.errors import CheckError
from flowgraph.passes.pipeline import load
from flowgraph.passes.rewrite import PASSES
from flowgraph.plan.compile import compile_file, compile_graph
from flowgraph.plan.plan import Plan, from_json, to_json
from tests.graphs.retyped import TYPES
from tests.unit.graphs import good

ROOT = Path(__file__).parents[2]
TOY = str(ROOT / "tests/runtime/toy.yaml")


@pytest.fixture(scope="module")
def toy() -> Plan:
    return compile_file(TOY)


def test_a_plan_survives_json(toy: Plan) -> None:
    assert from_json(to_json(toy)) == toy


def test_lowering_is_a_function_of_the_file(toy: Plan) -> None:
    assert to_json(compile_file(TOY)) == to_json(toy)


def test_columns_are_priced_at_the_mean_and_the_bound_of_one_row(toy: Plan) -> None:
    # a trajectory has 2 leaves of prompt (2.5, at most 4) plus response (2, at most 4) tokens
    tokens, mask, offsets = (
        toy.hops["rollout"].column(n) for n in ("tokens", "response_mask", "leaf_offsets")
    )
    assert (tokens.mean_bytes, tokens.max_bytes) == (2 * 4.5 * 4, 2 * 8 * 4)
    assert (mask.mean_bytes, mask.max_bytes) == (2, 2)  # 9 to 16 bits
    assert (offsets.mean_bytes, offsets.max_bytes) == (3 * 8, 3 * 8)
    # on a step they are those of 2 groups of 3 samples
    plain = compile_file(TOY, off=PASSES)
    assert plain.hops["advantage"].column("out").max_bytes == 6 * 2 * 8 * 4
    assert plain.hops["rollout"].column("response_mask").max_bytes == 2 * 8


def test_a_column_that_nobody_reads_is_never_written(toy: Plan) -> None:
    rollout = toy.hops["rollout"]
    assert not rollout.column("unread").written
    assert "unread" not in [c.name for c in rollout.written]


def test_a_block_holds_the_bounds_of_all_written_columns(toy: Plan) -> None:
    for hop in toy.hops.values():
        assert hop.block_bytes >= sum(c.max_bytes for c in hop.written)
        assert len(hop.dims) == len(hop.bounds)
        assert (hop.slots > 0) == bool(hop.written)
    rollout = toy.hops["rollout"]
    assert dict(zip(rollout.dims, rollout.bounds, strict=True)) == {"token": 16, "leaf+1": 3}


def test_an_arena_holds_every_block_of_its_owner(toy: Plan) -> None:
    for name, owner in toy.owners.items():
        assert owner.arena_bytes == sum(h.slots * h.block_bytes for h in toy.hops.values() if h.owner == name)


def test_without_defer_every_block_has_a_place_with_its_owner_and_one_with_the_driver() -> None:
    plan = compile_file(TOY, off=["defer"])
    written = [h for h in plan.hops.values() if h.written]
    assert {h.home for h in written} == {"driver"}
    assert plan.owners["driver"].arena_bytes == sum(h.slots * h.block_bytes for h in written)
    transports = {(s.source, s.reader): s.transport for s in plan.seams}
    assert transports["batch", "reward"] == "through the driver"


def test_values_are_gathered_by_what_they_are(toy: Plan) -> None:
    gathers = {f"{h.name}.{r.port}": r.gather for h in toy.hops.values() for r in h.reads}
    assert gathers["rollout.prompt"] == "same"
    assert gathers["reward.tokens"] == "concat"
    assert gathers["reward.leaf_offsets"] == "offsets"
    assert gathers["reward.ground_truth"] == "repeat"
    assert gathers["train.lag"] == "same"


def test_a_hop_on_rows_waits_for_every_writer_of_its_own_rows(toy: Plan) -> None:
    assert toy.hops["rollout"].trigger == ("dispatch",)
    assert set(toy.hops["train"].trigger) == {"batch", "advantage"}
    assert toy.hops["eval"].trigger == ()
    assert toy.hops["eval"].watches[0].every == 2


def test_parameters_come_from_dims_seams_and_the_run(toy: Plan) -> None:
    bound = toy.hops["dispatch"].bound
    assert (bound["groups"], bound["samples"], bound["max_lag"], bound["steps"], bound["seed"]) == (
        2,
        3,
        0,
        6,
        3,
    )
    assert toy.hops["buffer"].bound["max_lag"] == 0


def test_there_is_one_seam_for_every_hop_that_a_hop_names(toy: Plan) -> None:
    graph = load(TOY).graph
    assert graph is not None
    assert {(s.source, s.reader) for s in toy.seams} == {
        (b.via, n.name) for n in graph.nodes.values() for b in n.bindings
    }
    transport = {(s.source, s.reader): s.transport for s in toy.seams}
    assert transport["rollout", "buffer"] == "control"
    assert transport["batch", "reward"] == "shared memory"
    assert transport["reward", "advantage"] == "fused"
    back = next(s for s in toy.seams if (s.source, s.reader) == ("sync", "dispatch"))
    assert (back.delay, back.max_lag, back.fields) == (1, 0, ())


def test_a_seam_is_priced_as_its_reader_reads_it(toy: Plan) -> None:
    seam = next(s for s in toy.seams if (s.source, s.reader) == ("batch", "reward"))
    fields = {f.port: f for f in seam.fields}
    assert fields["tokens"].mean_bytes == 6 * 2 * 4.5 * 4
    assert fields["tokens"].max_bytes == 6 * 2 * 8 * 4
    assert fields["ground_truth"].producer == "dataset"
    assert fields["ground_truth"].mean_bytes == 2 * 256  # once a group
    assert fields["ground_truth"].max_bytes == 6 * 4096  # should a batch take one of each group
    assert seam.max_bytes == sum(f.max_bytes for f in seam.fields)


def test_more_lag_means_more_blocks_and_a_deeper_queue(tmp_path: Path) -> None:
    plan = compile_graph(good(tmp_path))
    assert (plan.max_lag, plan.overlap) == (1, True)
    assert plan.hops["split"].slots == (1 + 2) * 8 + 2
    assert plan.hops["batch"].queue == 1


def test_tensors_on_trajectories_have_a_block_for_each() -> None:
    """Two blocks are enough for weights, of which there is one set a step."""
    use = f"tests.graphs.retyped.hops__rollout__complete__versions__{TYPES.index(Annotated[dict[str, Any], Tensors()])}"
    plan = compile_file(str(ROOT / "graphs/quickstart.yaml"), [f"hops.rollout.use={use}"])
    assert plan.hops["rollout"].slots == 2 * 64 + 2
    assert plan.hops["train"].slots == 2


def test_the_quickstart_prices_its_weights_from_the_model() -> None:
    plan = compile_file(str(ROOT / "graphs/quickstart.yaml"))
    weights = plan.hops["train"].column("weights")
    assert weights.max_bytes == pytest.approx(134_515_008 * 2, rel=1e-4)
    assert plan.owners["rollout"].context == sum(plan.dims[d].max for d in ("prompt", "response"))


def test_a_graph_with_findings_raises_them_all(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("graph: x\nhops: {a: {use: b}, c: {}}\n")
    with pytest.raises(CheckError) as error:
        compile_file(str(path))
    assert [d.code for d in error.value.diagnostics] == ["FG107", "FG105"]
