"""The shipped graph of a model with experts: with replay, training executes the experts that its rollout did."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import flowgraph
from tests.runtime.harness import timeless

GRAPH = Path(__file__).parents[2] / "graphs" / "moe_r3.yaml"
PASSES = ("project", "fold", "encode", "narrow", "place", "defer", "fuse")
WITHOUT = {"hops.train.with.replay": False}
SMALL = {"dims.group": 2, "owners.rollout.threads": 1, "owners.trainer.threads": 1}


def run(runs: Path, **options: Any) -> tuple[list[dict[str, Any]], str]:
    """The records of its steps, and the hash of the model that it ends with."""
    done = flowgraph.run(GRAPH, runs=runs, **options)
    records = [json.loads(line) for line in (Path(done.directory) / "metrics.jsonl").read_text().splitlines()]
    weights = (Path(done.directory) / "model" / "model.safetensors").read_bytes()
    return [timeless(one) for one in records], hashlib.sha256(weights).hexdigest()


def test_with_replay_no_routing_differs_and_rollout_and_training_agree_better(tmp_path: Path) -> None:
    """The engine computes in bfloat16 and the learner in float32, so that routers left alone choose otherwise."""
    replayed, _ = run(tmp_path / "on", overrides=SMALL, executor="inproc")
    free, _ = run(tmp_path / "off", overrides=SMALL | WITHOUT, executor="inproc")
    assert len(replayed) == len(free) == 5
    for step in (*replayed, *free):
        assert step["train.recorded"] == 1
        assert 0 < step["reward.reward"] < 1
        assert step["train.grad_norm"] > 0
    assert [step["train.routing_mismatch"] for step in replayed] == [0] * 5
    assert all(step["train.routing_mismatch"] > 0.01 for step in free)
    gaps = [sum(step["train.logprob_gap"] for step in steps) for steps in (replayed, free)]
    assert gaps[0] < gaps[1] / 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_trains_to_the_same_bits_with_and_without_passes_in_one_process_and_in_three(
    tmp_path: Path,
) -> None:
    small = SMALL | {"run.steps": 2, "budgets": {}}
    one = run(tmp_path / "a", overrides=small, executor="inproc")
    assert run(tmp_path / "b", overrides=small, executor="processes") == one
    assert run(tmp_path / "c", overrides=small, executor="inproc", no_pass=PASSES) == one
    assert run(tmp_path / "d", overrides=small, executor="inproc", verify=True) == one


BEHIND = {"hops.dispatch.in.version.max_lag": 2, "hops.batch.capacity": 1}
MODEL = {f"owners.{owner}.model": "tiny-moe-300" for owner in ("rollout.engine", "trainer.learner")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [MODEL, BEHIND, BEHIND | {"hops.sync.with.pause": "in_place"}, {"owners.rollout.engine.processes": 1}],
    ids=["300 experts", "retracted", "in place", "in a server"],
)
def test_no_routing_differs_whatever_became_of_requests_under_way(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """Where weights change meanwhile, a row is what was chosen when its token was first computed, and is replayed."""
    steps, _ = run(tmp_path, overrides=SMALL | more, executor="processes")
    assert [step["train.routing_mismatch"] for step in steps] == [0] * 5
    assert [step["train.recorded"] for step in steps] == [1] * 5
