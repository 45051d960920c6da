"""A hop's own dims are what its inputs make of them, in types, prices, promises and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgraph.passes.pipeline import load
from flowgraph.passes.rewrite import PASSES
from flowgraph.plan.compile import compile_file
from tests.runtime.harness import TOY, run_toy, steps
from tests.unit.graphs import codes

OWN = ("owners.scorer={}", "hops.same={use: tests.runtime.generic.same, in: {x: advantage}}")
SPREAD = (
    "hops.spread={use: tests.runtime.generic.spread, in: {x: reward.score, bounds: batch.leaf_offsets, like: same}}",
    "hops.train.in.advantages=spread",
)


def test_an_output_has_the_dim_that_the_input_gave() -> None:
    graph = load(TOY, OWN).graph
    assert graph is not None
    (out,) = graph.nodes["same"].spec.columns
    assert [str(d) for d in out.shape] == ["token"]
    assert graph.nodes["same"].spec.facts.maps == "token"


def test_bounds_say_what_is_between_them_and_promises_follow() -> None:
    plan = compile_file(TOY, (*OWN, *SPREAD))
    out = plan.hops["spread"].column("out")
    assert (out.shape, out.facts) == (("token",), ("TiledOver(leaf)",))
    assert out.stored_shape == ("leaf",)
    plain = compile_file(TOY, (*OWN, *SPREAD), off=PASSES).hops["spread"].column("out")
    assert plain.max_bytes == 6 * 2 * 8 * 4
    assert out.max_bytes == 6 * 2 * 4


@pytest.mark.parametrize("off", [(), tuple(PASSES)], ids=["all passes", "no pass"])
def test_hops_with_dims_of_their_own_run(off: tuple[str, ...], tmp_path: Path) -> None:
    named = run_toy(tmp_path / "a", *OWN, *SPREAD, "run.steps=2", off=off)
    assert len(steps(named.directory)) == 2


def test_a_dim_that_two_inputs_give_differently_is_a_finding_at_the_second(tmp_path: Path) -> None:
    small = "tests.diagnostics.small"
    ring = f"""\
  source: {{use: {small}.source}}
  split: {{use: {small}.split, in: {{group: source}}}}
  batch: {{use: {small}.batch, in: {{trajectory: split}}}}
  count: {{use: {small}.count, in: {{key: batch}}, with: {{bins: 3}}}}
  table: {{use: {small}.table, in: {{key: batch}}}}
"""
    good = f"  scaled: {{use: {small}.scaled, in: {{a: count, b: count}}}}\n"
    assert codes(tmp_path, ring + good) == []
    assert codes(tmp_path, ring + good.replace("b: count", "b: table")) == ["FG207 table"]
    # What follows has the dim that was bound first, and is not blamed for the second.
    after = "  after: {use: " + small + ".scaled, in: {a: scaled, b: count}}\n"
    assert codes(tmp_path, ring + good.replace("b: count", "b: table") + after) == ["FG207 table"]


def test_a_dim_of_an_output_that_no_input_gives_needs_a_size(tmp_path: Path) -> None:
    small = "tests.diagnostics.small"
    ring = f"""\
  source: {{use: {small}.source}}
  split: {{use: {small}.split, in: {{group: source}}}}
  batch: {{use: {small}.batch, in: {{trajectory: split}}}}
  made: {{use: {small}.makes_up, in: {{key: batch}}}}
"""
    assert codes(tmp_path, ring) == ["FG204 made"]
