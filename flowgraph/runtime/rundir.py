"""The run directory: everything about one run, written as it happens.

graph.yaml    the resolved graph, overrides applied, with source and sha256 of every model; runs again as it is
plan.json     the plan
metrics.jsonl one line a step (and one an evaluation), flushed as it is written
seams.json    measured bytes of every seam
summary.json  how it ended, the ledger, and idle shares, lags and depths of the run
ring.svg      the diagram;  logs/ what the workers printed;  model/ the trained model
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from flowgraph.errors import RunError
from flowgraph.plan.measured import Measured
from flowgraph.plan.plan import Plan, to_json
from flowgraph.runtime.ledger import Counts


class RunDir:
    """One run's directory, made new. Every file is written whole or line by line; none is left half-written."""

    def __init__(self, root: Path, graph: str) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        parent = root / graph
        for attempt in itertools.count():
            self.path = parent / (stamp if attempt == 0 else f"{stamp}-{attempt}")
            with _writing(self.path):
                try:
                    self.path.mkdir(parents=True)
                    break
                except FileExistsError:
                    if not self.path.is_dir():
                        raise
        with _writing(self.path):
            self.metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def graph(self, resolved: dict[str, Any], plan: Plan) -> None:
        self._write("graph.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, width=110))
        self._write("plan.json", to_json(plan).decode())

    def diagram(self, svg: str) -> None:
        self._write("ring.svg", svg)

    def line(self, record: dict[str, Any]) -> None:
        """One line of JSON; a number that JSON does not have is null."""
        import msgspec

        with _writing(self.path):
            self.metrics.write(msgspec.json.format(msgspec.json.encode(record), indent=0).decode() + "\n")

    def seams(self, measured: Measured) -> None:
        import msgspec

        self._write("seams.json", msgspec.json.format(msgspec.json.encode(measured), indent=1).decode())

    def summary(
        self,
        status: str,
        steps: int,
        seconds: float,
        ledger: Counts,
        measured: dict[str, Any],
        error: str = "",
    ) -> None:
        import msgspec

        record = {
            "status": status,
            "steps": steps,
            "seconds": round(seconds, 3),
            "ledger": msgspec.to_builtins(ledger),
            **measured,
            "error": error,
        }
        self._write("summary.json", json.dumps(record, indent=1))

    def error(self, text: str) -> None:
        self._write("error.txt", text)

    def close(self) -> None:
        with _writing(self.path):
            self.metrics.close()

    def _write(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        with _writing(self.path):
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self.path / name)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        help = "free some space there, or choose another place with --runs"
        raise RunError(f"can't write the run directory {path}: {error.strerror}", help) from error
