"""What a weight sync costs, by each way into a server, and what share of the weights a step changes.

`python bench/sync.py [--steps 5] [--python .venv-sglang/bin/python]`; without an interpreter that has SGLang (or
FLOWGRAPH_SGLANG_PYTHON) its rows are left out. First the quickstart's graph trains for some steps, and the weights
after each are kept: those are what is pushed, so that a delta has the bytes of a real step. Then each engine and way
takes them one after the other, in a process of its own. The first push is of the whole set, whatever the way, and
isn't counted.

sync: the whole of it, through the fleet, with no request under way: staging (checks, one copy, for a delta also its
encoding) and the five actions, of which `update` sends, loads and verifies. memcpy: copying as many bytes as were
pushed from one buffer to another in the same process; x: how many times that the sync took. All are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GRAPH, MODEL, DTYPE = "graphs/quickstart.yaml", "smollm2-135m", "bfloat16"
ACTIONS = ("pause", "release", "update", "resume", "continue")
ROWS: dict[str, dict[str, Any]] = {
    "transformers, embedded": {"use": "transformers"},
    "transformers, disk": {"use": "transformers", "processes": 1, "weights": "disk"},
    "transformers, delta": {"use": "transformers", "processes": 1, "weights": "delta"},
    "sglang, disk": {"use": "sglang", "device": "cpu", "weights": "disk"},
    "sglang, tensor": {"use": "sglang", "device": "cpu", "weights": "tensor"},
    "sglang, distributed": {"use": "sglang", "device": "cpu", "weights": "distributed"},
    "sglang, delta": {"use": "sglang", "device": "cpu", "weights": "delta"},
}


def train(where: Path, steps: int) -> list[dict[str, float]]:
    """Run the quickstart in this process; `where` gets v0 (before) to v<steps> as files. → each step's metrics"""
    from safetensors.torch import save_file

    from flowgraph.cli import main
    from flowgraph.learners.torch import TorchLearner

    step, seen = TorchLearner.step, []

    def recording(self: TorchLearner, *args: Any, **more: Any) -> dict[str, float]:
        if not seen:
            save_file(self.weights(), where / "v0.safetensors")
        seen.append(step(self, *args, **more))
        save_file(self.weights(), where / f"v{len(seen)}.safetensors")
        return seen[-1]

    options = ["--executor", "inproc", "--plain", "--steps", str(steps), "--runs", str(where / "runs")]
    no_eval = ["--set", "hops.eval.with.prompts=1", "--set", "hops.eval.with.samples=1"]
    TorchLearner.step = recording  # type: ignore[method-assign]
    try:
        main(["run", GRAPH, *options, *no_eval], standalone_mode=False)
    finally:
        TorchLearner.step = step  # type: ignore[method-assign]
    return seen


def changes(where: Path, metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Of each step: the share of elements whose stored bits changed, and the bytes of its delta."""
    from safetensors.torch import load_file

    from flowgraph.engines.weights.delta import encode, pack

    found = []
    before = load_file(where / "v0.safetensors")
    for at, metric in enumerate(metrics, 1):
        after = load_file(where / f"v{at}.safetensors")
        delta = encode(before, after, base=at - 1, version=at)
        whole = sum(tensor.nbytes for tensor in after.values())
        found.append({**metric, "share": delta.changed, "delta": len(pack(delta)), "whole": whole})
        before = after
    return found


async def push(options: Any, model_dir: str, where: Path, steps: int) -> dict[str, float]:
    """Sync one engine to the weights of each step; medians of all but the first."""
    from safetensors.torch import load_file

    from flowgraph.engines.registry import start_engine

    journal: list[Any] = []
    seen: dict[str, list[float]] = {name: [] for name in ("sync", "staging", "bytes", "memcpy", *ACTIONS)}
    with tempfile.TemporaryDirectory() as logs:
        engine = await start_engine(
            options,
            model_dir,
            context=96,
            threads=len(os.sched_getaffinity(0)),
            logs=logs,
            journal=journal.append,
            patience=600,
        )
        try:
            for version in range(1, steps + 1):
                mapped = load_file(where / f"v{version}.safetensors")
                weights = {name: tensor.clone() for name, tensor in mapped.items()}  # as a learner has them
                journal.clear()
                done = await engine.sync(weights, version)
                if done.retries:
                    raise SystemExit(f"a sync was retried: {journal}")
                if version > 1:
                    took = {entry.action: entry.seconds for entry in journal if entry.outcome == "done"}
                    for name in ACTIONS:
                        seen[name].append(took[name])
                    seen["sync"].append(done.seconds)
                    seen["staging"].append(done.seconds - sum(took[name] for name in ACTIONS))
                    seen["bytes"].append(float(done.pushed))
                    seen["memcpy"].append(memcpy(done.pushed))
        finally:
            await engine.close()
    return {name: statistics.median(values) for name, values in seen.items()}


def memcpy(size: int) -> float:
    """Seconds to copy so many bytes, once both buffers are there; the median of 5."""
    import numpy as np

    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def child(row: str, where: Path, steps: int, python: str) -> Any:
    """Measure one row in this process."""
    if row == "steps":
        return changes(where, train(where, steps))
    import msgspec

    from flowgraph.engines.registry import EngineOptions
    from flowgraph.models import ensure

    given = {**ROWS[row], "model": MODEL, "dtype": DTYPE, "slots": 4}
    if given["use"] == "sglang":
        given |= {"python": python}
    return asyncio.run(push(msgspec.convert(given, EngineOptions), ensure(MODEL).path, where, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=5, help="at least 2; the first is pushed as a whole")
    parser.add_argument("--python", default=os.environ.get("FLOWGRAPH_SGLANG_PYTHON", ""))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--where", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(child(given.row, given.where, given.steps, given.python)))
        return
    if given.steps < 2:
        parser.error("--steps must be at least 2")

    def measure(row: str) -> Any:
        print(f"… {row}", file=sys.stderr)
        command = [sys.executable, __file__, "--row", row, "--where", where, "--steps", str(given.steps)]
        command += ["--python", given.python]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT, env=environment)
        if ran.returncode:
            raise SystemExit(f"{row} failed:\n{ran.stderr[-3000:]}")
        return json.loads(ran.stdout.splitlines()[-1])

    with tempfile.TemporaryDirectory() as where:
        print(f"{MODEL}, {DTYPE}, {GRAPH}; what each optimiser step changed\n")
        print(
            f"{'step':<6}{'lr':>9}{'grad norm':>11}{'changed %':>11}{'delta MB':>10}{'whole MB':>10}{'x':>6}"
        )
        for at, step in enumerate(measure("steps"), 1):
            line = f"{at:<6}{step['lr']:>9.1e}{step['grad_norm']:>11.2f}{100 * step['share']:>11.2f}"
            line += f"{step['delta'] / 1e6:>10.1f}{step['whole'] / 1e6:>10.1f}"
            print(line + f"{step['whole'] / step['delta']:>6.1f}")
        print(f"\nseconds of a sync, medians of {given.steps - 1}\n")
        names = ("sync", "staging", *ACTIONS)
        print(f"{'':<24}{'MB':>7}" + "".join(f"{name:>9}" for name in names) + f"{'memcpy':>9}{'x':>7}")
        for row, options in ROWS.items():
            if options["use"] == "sglang" and not given.python:
                continue
            found = measure(row)
            line = f"{row:<24}{found['bytes'] / 1e6:>7.1f}" + "".join(
                f"{found[name]:>9.3f}" for name in names
            )
            print(line + f"{found['memcpy']:>9.4f}{found['sync'] / found['memcpy']:>7.0f}")


if __name__ == "__main__":
    main()
