"""The shipped graph with a critic: it runs, equally on both executors, and actor and critic are both trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flowgraph
from tests.runtime.harness import timeless

GRAPH = Path(__file__).parents[2] / "graphs" / "ppo.yaml"
SMALL = {
    "dims.group": 2,
    "dims.sample": 4,
    "hops.eval.with.prompts": 1,
    "hops.eval.with.samples": 1,
    "hops.fit.with.epochs": 2,
    **{f"owners.{owner}.threads": 1 for owner in ("rollout", "trainer", "critic")},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_steps_are_equal_on_both_executors(tmp_path: Path) -> None:
    def run(executor: Any) -> tuple[list[dict[str, Any]], list[bytes]]:
        done = flowgraph.run(GRAPH, runs=tmp_path / executor, steps=2, overrides=SMALL, executor=executor)
        where = Path(done.directory)
        records = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
        models = [(where / name / "model.safetensors").read_bytes() for name in ("model", "model-critic")]
        return [timeless(one) for one in records], models

    records, models = run("inproc")
    steps = [one for one in records if "fit.loss" in one]
    assert len(steps) == 2
    for step in steps:
        assert step["fit.loss"] > 0
        assert step["fit.grad_norm"] > 0
        assert step["fit.tokens"] == step["train.tokens"]
        assert "fit.entropy" not in step
    assert steps[0]["fit.value"] != steps[1]["fit.value"]
    assert (records, models) == run("processes")
