"""What a check costs grows with the hops, counted in calls of Python functions: a clock would depend on the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.compile import ring
from flowgraph.passes.pipeline import load
from flowgraph.plan.compile import compile_graph


def calls(path: Path, hops: int) -> float:
    """Calls a hop to check, rewrite and lower a ring of this size."""
    path.write_text(ring(hops))
    count = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        loaded = load(str(path))
        assert loaded.graph is not None
        plan = compile_graph(loaded.graph)
    finally:
        sys.setprofile(before)
    assert not loaded.diagnostics, loaded.diagnostics
    assert len(plan.hops) == hops
    return count / hops


def test_ten_times_the_hops_cost_ten_times_as_much(tmp_path: Path) -> None:
    path = tmp_path / "ring.yaml"
    calls(path, 8)  # imports, and reads each function once
    assert calls(path, 2000) == pytest.approx(calls(path, 200), rel=0.2)


def test_a_cycle_as_long_as_the_ring_is_found_in_one_pass(tmp_path: Path) -> None:
    path = tmp_path / "ring.yaml"
    path.write_text(ring(2000).replace("x: rollout.x", "x: t990"))
    loaded = load(str(path))
    assert [d.code for d in loaded.diagnostics] == ["FG401"]
