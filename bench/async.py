"""What overlap is worth: graphs/async.yaml as it is, and the same graph with `max_lag: 0`, alternating, in one go.

`python bench/async.py [--steps 8] [--rounds 2]`. Figures are medians of rounds, over all steps but the first. A third
run, synchronous with one thread an owner, says what limits the gain: alone, rollout and training may each use all
cores, side by side they share them. So overlap can win only what more threads within each of them waste, and the tail
of a batch, when few responses are still being sampled: with more in flight the engine computes larger batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SYNC = ["hops.dispatch.in.version.max_lag=0", "hops.batch.capacity=0"]
ONE_THREAD = ["owners.rollout.threads=1", "owners.trainer.threads=1"]
JOBS = {"asynchronous": [], "synchronous": SYNC, "synchronous, 1 thread": [*SYNC, *ONE_THREAD]}


def run(runs: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    """One run: trajectories a minute, seconds a step, idle shares, seconds that each hop was busy a step, and lags."""
    command = [sys.executable, "-m", "flowgraph.cli", "run", "graphs/async.yaml", "--plain"]
    command += ["--steps", str(steps), "--runs", str(runs)]
    sets = [part for one in overrides for part in ("--set", one)]
    subprocess.run([*command, *sets], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    directory = max((runs / "async").iterdir(), key=lambda path: path.stat().st_mtime)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if "step_seconds" in line][1:]
    seconds = sum(r["step_seconds"] for r in records)

    def share(kind: str, name: str, state: str) -> float:
        return sum(r["shares"][kind][name][state] * r["step_seconds"] for r in records) / seconds

    lags: Counter[int] = Counter()
    for record in records:
        lags.update({int(lag): n for lag, n in record["lags"].items()})
    hops = records[0]["shares"]["hops"]
    plan = json.loads((directory / "plan.json").read_text())
    assert max(lags) <= plan["max_lag"], f"lag {max(lags)} is beyond max_lag {plan['max_lag']}"
    return {
        "max_lag": plan["max_lag"],
        "per minute": 60 * sum(lags.values()) / seconds,
        "s/step": seconds / len(records),
        "rollout idle": 1 - share("owners", "rollout", "busy"),
        "trainer idle": 1 - share("owners", "trainer", "busy"),
        "busy": {hop: share("hops", hop, "busy") * seconds / len(records) for hop in hops},
        "lags": lags,
        "tokens": sum(r["tokens"] for r in records) / len(records),
    }


def median(rows: list[dict[str, Any]], *path: str) -> float:
    values = []
    for row in rows:
        value: Any = row
        for key in path:
            value = value[key]
        values.append(value)
    return statistics.median(values)


def alone(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Seconds a step of rollout, of training, and of the push of weights, where nothing runs beside them."""
    train = next(hop for hop in rows[0]["busy"] if "train" in hop.split(" → "))
    return median(rows, "busy", "rollout"), median(rows, "busy", train), median(rows, "busy", "sync")


def report(results: dict[str, list[dict[str, Any]]]) -> None:
    base = median(results["synchronous"], "per minute")
    print(
        f"\n{'':22} {'per minute':>10} {'x':>5} {'s/step':>7} {'rollout idle':>13} {'trainer idle':>13}   lag"
    )
    for name, rows in results.items():
        lags = sum((row["lags"] for row in rows), Counter())
        histogram = ", ".join(f"{lag}: {n / lags.total():.0%}" for lag, n in sorted(lags.items()))
        speed = median(rows, "per minute")
        print(
            f"{name:22} {speed:>10.1f} {speed / base:>5.2f} {median(rows, 's/step'):>7.2f} "
            f"{median(rows, 'rollout idle'):>13.0%} {median(rows, 'trainer idle'):>13.0%}   "
            f"{histogram} (bound {rows[0]['max_lag']})"
        )
    many, one = alone(results["synchronous"]), alone(results["synchronous, 1 thread"])
    cores = len(os.sched_getaffinity(0))
    print(f"\nalone, s/step on {cores} threads and on 1")
    for what, fast, slow in zip(("rollout", "training", "push of weights"), many, one, strict=True):
        print(f"  {what:16} {fast:>6.2f} {slow:>6.2f}   {slow / fast:.2f} x by {cores} threads")
    rollout, training = one[0] + one[2], one[1]
    spread = sum(one) / cores
    sync, reached = median(results["synchronous"], "s/step"), median(results["asynchronous"], "s/step")
    print(f"\ns/step: one after the other {sync:.2f}; side by side {reached:.2f}. At best, at these speeds:")
    print(f"  {max(rollout, training):.2f}, with a core each: the longer of rollout and push, and training")
    print(f"  {spread:.2f}, with all work spread evenly over {cores} cores: a gain of {sync / spread:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in JOBS}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(options.rounds):
            for job, overrides in JOBS.items():
                results[job].append(run(Path(name), options.steps, overrides))
                one = results[job][-1]
                print(f"{job}: {one['per minute']:.1f} a minute, {one['s/step']:.2f} s/step", flush=True)
    report(results)


if __name__ == "__main__":
    main()
