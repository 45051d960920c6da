"""The shipped graph of several turns as a user runs it: forks occur, each token is trained once, on any executor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flowgraph
from hops.environments import Generate, calculator
from hops.rows import Example
from tests.runtime.harness import timeless

ROOT = Path(__file__).parents[2]
GRAPH = str(ROOT / "graphs" / "multiturn.yaml")
SMALL = {"dims.group": 2, "run.steps": 2}
PLAY = calculator(calls=3, history="notes", max_tokens=14)


async def fragile(example: Example, generate: Generate) -> Any:
    """The calculator, which falls to pieces at every other question."""
    got = await PLAY(example, generate)
    if sum(str(example.ground_truth).encode()) % 2:
        raise OSError("the calculator fell")
    return got


def run(tmp_path: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    done = flowgraph.run(GRAPH, runs=str(tmp_path), **options)
    records = [json.loads(line) for line in (Path(done.directory) / "metrics.jsonl").read_text().splitlines()]
    ledger = json.loads((Path(done.directory) / "summary.json").read_text())["ledger"]
    return [timeless(one) for one in records], ledger


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forks_occur_and_each_token_is_trained_once_on_any_executor(smollm2: str, tmp_path: Path) -> None:
    one, ledger = run(tmp_path / "a", overrides=SMALL, executor="inproc", verify=True)
    other, _ = run(tmp_path / "b", overrides=SMALL, executor="processes")
    assert one == other
    assert ledger["consumed"] == ledger["dispatched"] == 32
    for step in one:
        assert step["check.forks"] > 0
        assert step["check.leaves"] == step["train.rows"] == 16 + step["check.forks"]
        assert step["train.tokens"] == pytest.approx(16 * step["rollout.length"])
        assert step["rollout.turns"] > 1
    assert sum(step["rollout.calls"] for step in one) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_s5_groups_whose_environment_raises_are_dropped_and_counted_and_training_goes_on(
    smollm2: str, tmp_path: Path
) -> None:
    """Case S5: their slots are free again."""
    environment = {"hops.rollout.with.environment": f"{__name__}.fragile"}
    small = {"dims.group": 1, "dims.sample": 4, "run.steps": 3}
    steps, ledger = run(tmp_path, overrides=small | environment, executor="inproc")
    assert len(steps) == 3
    assert ledger["consumed"] == 12
    assert set(ledger["dropped"]) == {"environment error"}
    assert ledger["dispatched"] == 12 + ledger["dropped"]["environment error"]
    assert ledger["dropped"]["environment error"] % 4 == 0
