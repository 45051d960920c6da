"""What a person sees of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from flowgraph.plan.plan import Plan
from flowgraph.runtime.shares import idle

LABELS = {"tokens_per_second": "tok/s", "lag_mean": "lag", "ready": "ready", "queued": "queue"}


class View(Protocol):
    """Told of every step and event; `note` is for what is neither."""

    def step(self, record: dict[str, Any]) -> None: ...

    def event(self, record: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_view(plan: Plan, *, live: bool | None = None) -> View:
    """A live view if stdout is a terminal (or `live` says so), else plain lines."""
    return LiveView(plan) if (sys.stdout.isatty() if live is None else live) else PlainView(plan)


def shown(plan: Plan, record: dict[str, Any]) -> dict[str, str]:
    """Label → text of what a step shows: the graph's `run.show`, else the first three named scalars."""
    names = plan.run.show or [k for k in record if "." in k][:3]
    out = {name.partition(".")[2] or name: _number(record[name]) for name in names if name in record}
    return out | {label: _number(record[name]) for name, label in LABELS.items() if name in record}


def shown_event(plan: Plan, record: dict[str, Any]) -> dict[str, str]:
    """Name → text of what an event shows: those of the graph's `run.show` that it has, else all."""
    names = [name for name in plan.run.show if name in record] or [name for name in record if "." in name]
    return {name: _number(record[name]) for name in names}


def shown_idle(idle: Mapping[str, float]) -> str:
    """`rollout idle 12 %, trainer idle 43 %`"""
    return ", ".join(f"{owner} idle {share:.0%}".replace("%", " %") for owner, share in idle.items())


def shown_lags(lags: Mapping[int, int]) -> str:
    """`lag 0: 40 %, 1: 60 %`, by trajectories."""
    total = sum(lags.values())
    shares = ", ".join(f"{lag}: {n / total:.0%}".replace("%", " %") for lag, n in lags.items())
    return f"lag {shares}" if shares else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


class PlainView:
    """One line a step. The time left is by the median of the last ten steps."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.took: list[float] = []

    def step(self, record: dict[str, Any]) -> None:
        values = "  ".join(f"{name} {text}" for name, text in shown(self.plan, record).items())
        self.took = [*self.took[-9:], record["step_seconds"]]
        left = (self.plan.run.steps - record["step"]) * statistics.median(self.took)
        clock = f"{record['step_seconds']:.1f} s, {_time(left)} left"
        print(f"step {record['step']:>3}/{self.plan.run.steps}  {values}  {clock}", flush=True)

    def event(self, record: dict[str, Any]) -> None:
        values = "  ".join(f"{name} {text}" for name, text in shown_event(self.plan, record).items())
        print(f"  after step {record['step']}: {values}", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class LiveView:
    """The last steps as a table, a sparkline of the first shown value, idle shares, and a bar with the time left."""

    def __init__(self, plan: Plan) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.plan = plan
        self.rows: list[dict[str, Any]] = []
        self.curve: list[float] = []
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.task = self.progress.add_task(plan.graph, total=plan.run.steps)
        self.live = Live(self._render(), console=Console(), refresh_per_second=4)
        self.live.start()

    def step(self, record: dict[str, Any]) -> None:
        self.rows = [*self.rows[-9:], record]
        name = next(iter(self.plan.run.show or [k for k in record if "." in k]), None)
        if name in record and math.isfinite(record[name]):
            self.curve.append(record[name])
        self.progress.update(self.task, completed=record["step"])
        self.live.update(self._render())

    def event(self, record: dict[str, Any]) -> None:
        values = "  ".join(f"{name} {text}" for name, text in shown_event(self.plan, record).items())
        self.live.console.print(f"after step {record['step']}: {values}")

    def note(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="dim", pad_edge=False)
        last = shown(self.plan, self.rows[-1]) if self.rows else {}
        for name in ("step", *last, "s/step"):
            table.add_column(name, justify="right")
        for record in self.rows:
            values = shown(self.plan, record)
            table.add_row(
                str(record["step"]), *(values.get(n, "") for n in last), f"{record['step_seconds']:.1f}"
            )
        shares = self.rows[-1].get("shares") if self.rows else None
        curve = Text(sparkline(self.curve[-60:]), style="green")
        below = [Text(shown_idle(idle(shares)), style="dim")] if shares else []
        return Group(table, curve, *below, self.progress)


def sparkline(values: list[float]) -> str:
    """One character a value, eight heights from the least to the largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = 7 / (high - low) if high > low else 0
    return "".join("▁▂▃▄▅▆▇█"[int((v - low) * scale)] for v in values)


def _time(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
