"""One graph, one plan, equal bits: the quickstart in one process and in three."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.harness import timeless

ROOT = Path(__file__).parents[2]
PROBE = (
    "hops.probe={use: tests.parity.probe.fingerprint, in: {tokens: batch, logprobs: batch, response_mask: batch, "
    "score: reward, advantages: advantage}}"
)


def quickstart(runs: Path, executor: str) -> list[dict[str, Any]]:
    """The records of two steps, without those of the clock."""
    command = [
        sys.executable,
        "-m",
        "flowgraph.cli",
        "run",
        "graphs/quickstart.yaml",
        "--executor",
        executor,
        "--steps",
        "2",
    ]
    done = subprocess.run(
        [*command, "--runs", str(runs), "--set", PROBE, "--set", "budgets={}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (runs / "quickstart").iterdir()
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines]


@pytest.mark.slow
def test_tokens_rewards_advantages_and_losses_are_equal_bit_for_bit(smollm2: str, tmp_path: Path) -> None:
    one = quickstart(tmp_path / "inproc", "inproc")
    two = quickstart(tmp_path / "processes", "processes")
    assert one == two
    steps = [record for record in one if "train.loss" in record]
    assert len(steps) == 2
    assert all(record["probe.n"] > 64 * 20 and 0 <= record["reward.reward"] <= 1 for record in steps)
    # Two different batches: a fingerprint that never changes would prove nothing.
    assert steps[0]["probe.tokens"] != steps[1]["probe.tokens"]
