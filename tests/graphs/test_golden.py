"""Golden plans: beside each shipped graph lies the text of its plan, so that a change of any plan shows in review."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowgraph.plan.compile import compile_file
from flowgraph.plan.text import plan_text

ROOT = Path(__file__).parents[2]
GRAPHS = sorted((ROOT / "graphs").glob("*.yaml"))


def golden(path: Path) -> Path:
    return path.with_suffix(".plan.txt")


@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_the_plan_of_a_graph_is_its_golden_plan(path: Path) -> None:
    kept = golden(path).read_text(encoding="utf-8") if golden(path).exists() else ""
    made = plan_text(compile_file(str(path)))
    name = f"graphs/{golden(path).name}"
    lines = difflib.unified_diff(kept.splitlines(), made.splitlines(), name, "the plan now", lineterm="")
    refresh = f"if that is meant: flowgraph explain graphs/{path.name} --stage lowered > {name}"
    assert kept == made, "\n".join([f"another plan than {name};", refresh, *lines])


def test_every_golden_plan_has_its_graph() -> None:
    assert GRAPHS
    assert sorted((ROOT / "graphs").glob("*.plan.txt")) == [golden(path) for path in GRAPHS]


def test_a_golden_plan_is_what_the_command_prints_on_any_machine(tmp_path: Path) -> None:
    """From another directory, without a model in the cache, where neither threads nor width are those of here."""
    path = ROOT / "graphs/quickstart.yaml"
    machine = {
        "FLOWGRAPH_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "7",
        "COLUMNS": "40",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "flowgraph.cli", "explain", str(path), "--stage", "lowered"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | machine, capture_output=True, check=True, timeout=60
    )
    assert done.stdout == golden(path).read_bytes()
    assert list(tmp_path.iterdir()) == []
