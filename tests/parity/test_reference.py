"""The shipped graph with a reference: two owners with a learner, several steps a batch, importance and KL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flowgraph

GRAPH = str(Path(__file__).parents[2] / "graphs" / "reference.yaml")
SMALL: dict[str, Any] = {"dims.group": 2, "dims.sample": 4, "run.steps": 2, "owners.trainer.learner.lr": 1e-4}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_policy_leaves_the_reference_step_by_step(smollm2: str, tmp_path: Path) -> None:
    done = flowgraph.run(GRAPH, runs=str(tmp_path), overrides=SMALL)
    lines = (Path(done.directory) / "metrics.jsonl").read_text().splitlines()
    one, two = [step for step in map(json.loads, lines) if "train.loss" in step]
    # The first optimiser step of the first batch is at the reference, the second is not.
    assert 0 < one["train.kl"] < two["train.kl"]
    assert one["train.ratio_p05"] < 1 < one["train.ratio_max"]
    assert 0.9 < one["train.kept"] <= 1
    assert one["train.weight"] == pytest.approx(1, abs=0.05)
    assert 0 < one["train.logprob_gap"] < one["train.logprob_gap_p95"] < one["train.logprob_gap_max"]
    assert one["train.skipped"] == two["train.skipped"] == 0
    assert one["train.rows"] == 8
    assert [found.name for found in Path(done.directory).glob("model*")] == [
        "model"
    ]  # what trains, and no other
