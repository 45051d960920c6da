"""Does the quickstart learn? `python bench/quickstart.py [--seeds 0 1 2]` runs it once a seed and scores held-out prompts.

The gain counts when it exceeds two standard errors of the difference of two independent means. Exit code 1 when
a seed does not reach that.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(seed: int, runs: str) -> Path:
    command = [sys.executable, "-m", "flowgraph.cli", "run", "graphs/quickstart.yaml", "--plain", "--runs", runs]
    subprocess.run([*command, "--set", f"run.seed={seed}"], cwd=ROOT, check=True)
    return max((Path(runs) / "quickstart").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    table = []
    with tempfile.TemporaryDirectory() as runs:
        for seed in seeds:
            directory = run(seed, f"{runs}/{seed}")
            records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            evals = [r for r in records if "eval.score" in r]
            summary = json.loads((directory / "summary.json").read_text())
            table.append((seed, evals[0], evals[-1], summary["seconds"]))
    print("\n seed   before            after             gain    2 x SE   minutes")
    learned = True
    for seed, before, after, seconds in table:
        gain = after["eval.score"] - before["eval.score"]
        two_se = 2 * math.hypot(before["eval.stderr"], after["eval.stderr"])
        learned &= gain > two_se
        b = f"{before['eval.score']:.3f} ± {before['eval.stderr']:.3f}"
        a = f"{after['eval.score']:.3f} ± {after['eval.stderr']:.3f}"
        print(f"{seed:>5}   {b}     {a}     {gain:.3f}   {two_se:.3f}    {seconds / 60:.1f}")
    print("every seed learned" if learned else "a seed did not learn")
    raise SystemExit(not learned)


if __name__ == "__main__":
    main()
