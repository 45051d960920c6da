"""A row that may outgrow its model is refused by name before a run, and priced all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import flowgraph
from flowgraph.cli import main
from flowgraph.errors import CheckError
from flowgraph.passes.ranks import unrunnable

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "graphs/quickstart.yaml")


def said(**dims: object) -> list[str]:
    graph = flowgraph.load(QUICKSTART, {f"dims.{name}": size for name, size in dims.items()}).graph
    assert graph is not None
    return [finding.message for finding in unrunnable(graph)]


def test_B3_rows_may_fill_the_context_of_their_model_and_not_be_longer() -> None:
    assert said(prompt=48, response=8144) == []
    longer = "may get a row of 8,193 tokens, and smollm2-135m has 8,192 positions"
    assert said(prompt=48, response=8145) == [f"owner rollout {longer}", f"owner trainer {longer}"]
    assert said(prompt=48, response=100, token=9000) == [
        "owner rollout may get a row of 9,000 tokens, and smollm2-135m has 8,192 positions",
        "owner trainer may get a row of 9,000 tokens, and smollm2-135m has 8,192 positions",
    ]


def test_it_is_refused_before_anything_starts_and_audited_all_the_same() -> None:
    with pytest.raises(CheckError) as caught:
        flowgraph.run(QUICKSTART, overrides={"dims.response": 9000})
    assert [finding.code for finding in caught.value.diagnostics] == ["FG114", "FG114"]
    assert "to 8,192 tokens together" in str(caught.value)
    assert flowgraph.audit(flowgraph.load(QUICKSTART, {"dims.response": 9000})).driver.mean > 0
    checked = CliRunner().invoke(main, ["check", QUICKSTART, "--set", "dims.response=9000"])
    assert checked.exit_code == 0
    assert "priced only: rollout, trainer" in checked.stdout


def test_the_graphs_that_run_fit_their_models() -> None:
    for path in sorted((ROOT / "graphs").glob("*.yaml")):
        graph = flowgraph.load(str(path)).graph
        assert graph is not None
        assert not [d.message for d in unrunnable(graph) if "positions" in d.message], path.name
