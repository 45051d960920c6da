"""The shipped graph as a user runs it: SmolLM2-135M on a real SGLang server trains for five steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import flowgraph

ROOT = Path(__file__).parents[2]
GRAPH = ROOT / "graphs" / "quickstart_sglang.yaml"
BOUND = 1e-3  # the graph's own, between log-probabilities of server and learner; 1e-5 is what is seen


@pytest.mark.sglang
def test_a_real_server_trains_and_holds_the_learners_weights_after_every_sync(
    smollm2: str, tmp_path: Path
) -> None:
    python = os.environ["FLOWGRAPH_SGLANG_PYTHON"]
    shared_memory = set(os.listdir("/dev/shm"))
    changed = {"owners.rollout.engine.python": python}
    done = flowgraph.run(str(GRAPH), overrides=changed, runs=str(tmp_path))
    assert done.steps == 5
    run = Path(done.directory)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert step["sync.gap"] <= BOUND
        assert step["train.logprob_gap"] <= BOUND  # of what the server sampled under the weights before
        assert (step["sync.replicas"], step["sync.retries"], step["lag_max"]) == (1, 0, 0)
        assert step["sync.pushed"] >= 4 * 134_515_008
    journal = [json.loads(line) for line in (run / "logs" / "rollout.sync.jsonl").read_text().splitlines()]
    ended = [(e["version"], e["action"]) for e in journal if e["outcome"] == "done"]
    actions = ("pause", "release", "update", "resume", "continue")
    assert ended == [(version, action) for version in range(1, 6) for action in actions]
    assert set(os.listdir("/dev/shm")) <= shared_memory


def test_the_graph_says_how_weights_get_into_the_server() -> None:
    plan = flowgraph.compile(flowgraph.load(str(GRAPH)))
    seam = next(s for s in plan.seams if (s.source, s.reader) == ("train", "sync"))
    assert seam.crossing == "shared memory, then disk to 1 server"
    assert seam.pushed is not None
    assert seam.pushed.mean_bytes == 4 * 134_515_008
