"""Every pass on against every pass off, with a real model: equal bits, and far fewer bytes through the driver."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import flowgraph
from flowgraph.plan.measured import Measured, read_measured
from flowgraph.plan.plan import Plan, from_json
from tests.runtime.harness import timeless

ROOT = Path(__file__).parents[2]
STEPS = 3
# Without passes the weights pass through the driver's memory, which its budgets refuse.
UNLIMITED = "budgets={}"


class Ran(NamedTuple):
    """A run of the quickstart. model: a hash of the weights that it saved."""

    records: list[dict[str, Any]]
    measured: Measured
    plan: Plan
    model: str


def quickstart(runs: Path, *options: str) -> Ran:
    command = [sys.executable, "-m", "flowgraph.cli", "run", "graphs/quickstart.yaml", "--runs", str(runs)]
    command += ["--steps", str(STEPS), "--set", UNLIMITED, "--plain", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (runs / "quickstart").iterdir()
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    saved = sorted((directory / "model").glob("*.safetensors"))
    return Ran(
        [timeless(json.loads(line)) for line in lines],
        read_measured(directory, "quickstart"),
        from_json((directory / "plan.json").read_bytes()),
        "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in saved),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_passes_give_the_bits_of_none_for_a_fifth_of_the_driver_s_bytes(
    smollm2: str, tmp_path: Path
) -> None:
    plain = quickstart(tmp_path / "none", "--no-pass", "all")
    full = quickstart(tmp_path / "all")
    assert plain.plan.passes == ()
    assert full.plan.passes == ("project", "fold", "encode", "narrow", "place", "defer", "fuse")

    assert full.records == plain.records
    assert full.model == plain.model != ""
    losses = [record["train.loss"] for record in full.records if "train.loss" in record]
    assert len(set(losses)) == STEPS

    # Relayed in and read out, once a step each.
    weights = 2 * STEPS * plain.plan.hops["train"].column("weights").max_bytes
    before, after = plain.measured.driver_bytes, full.measured.driver_bytes
    print(f"\nthrough the driver: {before:,} → {after:,} bytes, {before / after:,.0f}× fewer")
    print(f"without weights: {before - weights:,} → {after:,} bytes, {(before - weights) / after:.1f}× fewer")
    assert before - weights > 0
    assert before - weights >= 5 * after

    said = {(s.source, s.reader): s for s in flowgraph.explain(ROOT / "graphs/quickstart.yaml").seams}
    differing = [s for s in said.values() if s.read[0] != s.read[1] or s.driver[0] != s.driver[1]]
    assert len(differing) > 5
    assert all(s.passes for s in differing)
    for seam in plain.plan.seams:
        read = (_read(run.measured, seam.reader, [f.port for f in seam.fields]) for run in (plain, full))
        if len(set(read)) > 1:
            assert said[seam.source, seam.reader].passes, f"{seam.source} → {seam.reader} changed unsaid"


def _read(measured: Measured, reader: str, ports: list[str]) -> int:
    return sum(measured.read.get(f"{reader}.{port}", 0) for port in ports)
