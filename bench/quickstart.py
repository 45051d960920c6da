"""Does the quickstart learn? `python bench/quickstart.py [--seeds 0 1 2]` runs it once a seed.

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
    command = [
        sys.executable,
        "-m",
        "flowgraph.cli",
        "run",
        "graphs/quickstart.yaml",
        "--plain",
        "--runs",
        runs,
    ]
    subprocess.run([*command, "--set", f"run.seed={seed}"], cwd=ROOT, check=True)
    return max((Path(runs) / "quickstart").iterdir())


def curve(steps: list[float], evals: list[tuple[int, float, float]]) -> str:
    """An SVG of the reward of every training batch, and of the held-out scores with one standard error."""
    width, height, left, top = 640, 240, 46, 16
    x_of = lambda step: left + (width - left - 16) * step / max(1, len(steps))  # noqa: E731
    y_of = lambda value: top + (height - top - 36) * (1 - value)  # noqa: E731
    ink, batch, held = "#57606a", "#8c959f", "#0969da"
    size = f'width="{width}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = y_of(tick)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{width - 16}" y2="{y}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="{ink}">{tick:g}</text>')
    for tick in range(0, len(steps) + 1, 5):
        parts.append(
            f'<text x="{x_of(tick)}" y="{height - 20}" text-anchor="middle" fill="{ink}">{tick}</text>'
        )
    points = " ".join(f"{x_of(i + 1):.1f},{y_of(v):.1f}" for i, v in enumerate(steps))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{batch}" stroke-width="1.5"/>')
    line = " ".join(f"{x_of(s):.1f},{y_of(v):.1f}" for s, v, _ in evals)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{held}" stroke-width="2.5"/>')
    for step, value, error in evals:
        x = x_of(step)
        low, high = y_of(value - error), y_of(value + error)
        parts.append(f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{held}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y_of(value):.1f}" r="3.5" fill="{held}"/>')
    parts.append(f'<text x="{left}" y="{height - 4}" fill="{held}">held-out score ± standard error</text>')
    parts.append(
        f'<text x="{left + 190}" y="{height - 4}" fill="{batch}">reward of each training batch, by step</text></svg>'
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--curve", type=Path, help="write the first seed's reward curve as an SVG")
    options = parser.parse_args()
    seeds = options.seeds
    table = []
    with tempfile.TemporaryDirectory() as runs:
        for seed in seeds:
            directory = run(seed, f"{runs}/{seed}")
            records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            evals = [r for r in records if "eval.score" in r]
            summary = json.loads((directory / "summary.json").read_text())
            if options.curve and not table:
                rewards = [r["reward.reward"] for r in records if "reward.reward" in r]
                scores = [(r["step"], r["eval.score"], r["eval.stderr"]) for r in evals]
                options.curve.write_text(curve(rewards, scores))
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
