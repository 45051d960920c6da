"""The shipped graph of a model with indexers: with replay, training attends to what its rollout attended to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flowgraph

GRAPH = Path(__file__).parents[2] / "graphs" / "dsa_replay.yaml"
SMALL = {"dims.group": 2, "owners.rollout.threads": 1, "owners.trainer.threads": 1, "run.steps": 3}


def run(runs: Path, **options: Any) -> list[dict[str, Any]]:
    done = flowgraph.run(GRAPH, runs=runs, **options)
    lines = (Path(done.directory) / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if "train.loss" in one]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more", [{}, {"owners.rollout.engine.processes": 1}], ids=["embedded", "in a server"]
)
def test_with_replay_neither_experts_nor_positions_differ(tmp_path: Path, more: dict[str, Any]) -> None:
    """The engine computes in bfloat16 and the learner in float32, so that indexers left alone choose otherwise."""
    executor = "processes" if more else "inproc"
    replayed = run(tmp_path / "on", overrides=SMALL | more, executor=executor)
    free = run(
        tmp_path / "off", overrides=SMALL | more | {"hops.train.with.replay": False}, executor=executor
    )
    for step in (*replayed, *free):
        assert step["train.recorded"] == 1
    for name in ("train.routing_mismatch", "train.indexer_mismatch"):
        assert [step[name] for step in replayed] == [0] * 3
        assert all(step[name] > 0.01 for step in free)
    gaps = [sum(step["train.logprob_gap"] for step in steps) for steps in (replayed, free)]
    assert gaps[0] < gaps[1] / 3
