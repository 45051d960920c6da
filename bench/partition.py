"""512 rows to 8 ranks, by our partition and by verl's: `python bench/partition.py [--verl WHEEL]`.

verl's two functions are taken unchanged from its wheel, without what else their module imports. Without --verl it
is got with `pip download`. Lengths are exp(normal(6, 1)), cut at 16,384 tokens, 20 seeds; "tokens" is max / mean of the
parts' tokens, "work" of what a 7B model computes for them, 24,576 · n + n² as verl puts it, each partitioned by itself.
Of five calls on each seed the fastest counts.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from flowgraph.learners.partition import cost, imbalance, partition

ROWS, PARTS, SEEDS, CALLS = 512, 8, 20, 5
VERL = "verl==0.9.1"
Way = Callable[[Any], Sequence[Any]]


def lengths(seed: int) -> Any:
    drawn = np.random.default_rng(seed).lognormal(6, 1, ROWS)
    return np.clip(drawn, 1, 16_384).astype(np.int64)


def chunks(costs: Any) -> Sequence[Any]:
    return np.array_split(np.arange(len(costs)), PARTS)


def snake(costs: Any) -> Sequence[Any]:
    """By size, dealt to the parts there and back."""
    order = np.argsort(-np.asarray(costs)).reshape(-1, PARTS)
    order[1::2] = order[1::2, ::-1]
    return list(order.T)


def peers(wheel: Path) -> dict[str, Way]:
    """verl's own functions."""
    with zipfile.ZipFile(wheel) as files:
        module = ast.parse(files.read("verl/utils/seqlen_balancing.py"))
    wanted = ("karmarkar_karp", "greedy_partition")
    module.body = [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name in wanted]
    names: dict[str, Any] = {"heapq": __import__("heapq")}
    exec(compile(module, str(wheel), "exec"), names)

    def way(name: str, equal: bool) -> Way:
        return lambda costs: names[name](costs.tolist(), PARTS, equal)

    return {
        "verl Karmarkar–Karp, equal": way("karmarkar_karp", True),
        "verl Karmarkar–Karp, free": way("karmarkar_karp", False),
        "verl greedy, equal": way("greedy_partition", True),
        "verl greedy, free": way("greedy_partition", False),
    }


def download(where: str) -> Path | None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", where, VERL]
    if subprocess.run(command, check=False).returncode:
        return None
    return next(Path(where).glob("verl-*.whl"))


def row(name: str, way: Way) -> str:
    tokens, works, spreads, seconds = [], [], [], []
    for seed in range(SEEDS):
        one = lengths(seed)
        took = []
        for _ in range(CALLS):
            began = time.perf_counter()
            parts = way(one)
            took.append(time.perf_counter() - began)
        sizes = [len(part) for part in parts]
        assert sorted(i for part in parts for i in part) == list(range(ROWS))
        tokens.append(imbalance(one, parts))
        spreads.append(max(sizes) - min(sizes))
        seconds.append(min(took))
        priced = cost(one, 24_576, 1)
        works.append(imbalance(priced, way(priced.astype(np.int64))))
    figures = (statistics.median(tokens), max(tokens), statistics.median(works), max(works))
    cells = "".join(f"{figure:>11.6f}" for figure in figures)
    return f"{name:<30}{cells}{max(spreads):>8}{1e3 * statistics.median(seconds):>9.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", type=Path, help="a wheel of verl")
    wheel = parser.parse_args().verl
    ways: dict[str, Way] = {
        "flowgraph, equal": lambda costs: partition(costs, PARTS, equal=True),
        "flowgraph, free": lambda costs: partition(costs, PARTS),
        "contiguous chunks": chunks,
        "sorted, there and back": snake,
    }
    with tempfile.TemporaryDirectory() as where:
        wheel = wheel or download(where)
        ways |= peers(wheel) if wheel else {}
    print(f"{ROWS} rows to {PARTS} parts, {SEEDS} seeds: max / mean of the parts; rows: most less fewest")
    head = "".join(f"{name:>11}" for name in ("tokens", "worst", "work", "worst"))
    print(f"{'':<30}{head}{'rows':>8}{'ms':>9}")
    for name, way in ways.items():
        print(row(name, way))


if __name__ == "__main__":
    main()
