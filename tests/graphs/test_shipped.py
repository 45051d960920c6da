"""The graphs that are shipped have no findings, and the starter is the quickstart under another name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from flowgraph.cli import main
from flowgraph.plan.compile import compile_file

ROOT = Path(__file__).parents[2]
GRAPHS = sorted((ROOT / "graphs").glob("*.yaml"))


@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_a_shipped_graph_compiles(path: Path) -> None:
    plan = compile_file(str(path))
    assert plan.graph == path.stem
    assert plan.hops


def test_init_writes_the_quickstart_and_refuses_to_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(main, ["init", "mine.yaml"]).exit_code == 0
    quickstart = (ROOT / "graphs/quickstart.yaml").read_text()
    assert (tmp_path / "mine.yaml").read_text() == quickstart.replace("graph: quickstart", "graph: starter")
    assert runner.invoke(main, ["check", "mine.yaml"]).exit_code == 0
    again = runner.invoke(main, ["init", "mine.yaml"])
    assert again.exit_code == 2
    assert "mine.yaml exists" in again.output
