"""Running the toy ring from a test."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flowgraph.passes.pipeline import load
from flowgraph.runtime.run import ExecutorName, Outcome, run_graph

TOY = str(Path(__file__).parent / "toy.yaml")


def run_toy(
    tmp_path: Path,
    *overrides: str,
    executor: ExecutorName = "inproc",
    verify: bool = False,
    off: Collection[str] = (),
) -> Outcome:
    loaded = load(TOY, overrides)
    assert not loaded.diagnostics, loaded.diagnostics
    assert loaded.graph is not None
    assert loaded.root is not None
    return run_graph(
        loaded.graph,
        loaded.root.plain(),
        executor=executor,
        runs=str(tmp_path),
        live=False,
        off=off,
        verify=verify,
    )


def metrics(directory: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def steps(directory: str) -> list[dict[str, Any]]:
    """The step records, without what depends on the clock or on the order of arrival."""
    return [timeless(one) for one in metrics(directory) if "lag_max" in one]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    timed = ("tokens_per_second", "in_flight", "ready", "queued", "depths", "shares", "arenas")
    ends = ("seconds", ".engine_running", ".engine_waiting", ".engine_kv_used")
    folds = ("dispatch.", "buffer.", "batch.")  # what they show at the moment
    return {
        k: v for k, v in record.items() if k not in timed and not k.endswith(ends) and not k.startswith(folds)
    }


def summary(directory: str) -> dict[str, Any]:
    return dict(json.loads((Path(directory) / "summary.json").read_text()))


def only_run(tmp_path: Path) -> str:
    (directory,) = (tmp_path / "toy").iterdir()
    return str(directory)
