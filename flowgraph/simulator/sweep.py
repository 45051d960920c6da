"""A sweep: one simulation for every combination of values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flowgraph.errors import CheckError
from flowgraph.ir.graph import Node
from flowgraph.plan.plan import Plan
from flowgraph.simulator.outcome import Simulated, time_text
from flowgraph.simulator.run import simulate_plan
from flowgraph.simulator.settings import NAMES, make


class Swept(msgspec.Struct, frozen=True):
    """One combination: what was set, and what came of it; or why the compiler refuses it, as code and text."""

    set: dict[str, str]
    result: Simulated | None = None
    refused: str = ""


def sweep(
    planned: Callable[[list[str]], Plan],
    nodes: Mapping[str, Node],
    sweeps: Sequence[str],
    steps: int,
    settings: Mapping[str, Any],
) -> list[Swept]:
    """One for each combination. planned: the plan of the graph with overrides `path=value`; nodes: its hops.

    sweeps: `path=value,value,…` each, where path is that of an override, `hop.option`, or the name of a setting.
    Raises ValueError for another form, CheckError when every combination is refused, and what `simulate_plan` raises.
    """
    found: list[Swept] = []
    last: CheckError | None = None
    for at in _combinations(sweeps):
        overrides = [f"{_path(name, nodes)}={value}" for name, value in at.items() if name not in NAMES]
        changed = {name: value for name, value in at.items() if name in NAMES}
        try:
            plan = planned(overrides)
        except CheckError as error:
            last = error
            first = error.diagnostics[0]
            found.append(Swept(at, refused=f"{first.code}: {first.message}"))
            continue
        found.append(Swept(at, simulate_plan(plan, steps, make({**settings, **changed}))))
    if last is not None and not any(one.result for one in found):
        raise last
    return found


def _path(name: str, nodes: Mapping[str, Node]) -> str:
    """`hop.option` as the path of an override; any other path as it is."""
    hop, _, rest = name.partition(".")
    if hop not in nodes or not rest:
        return name
    first = rest.partition(".")[0]
    if any(param.name == first and param.origin == "with" for param in nodes[hop].spec.params):
        return f"hops.{hop}.with.{rest}"
    return f"hops.{hop}.in.{rest}" if nodes[hop].binding(first) is not None else f"hops.{name}"


def _combinations(sweeps: Sequence[str]) -> list[dict[str, str]]:
    """`path=a,b,c` each: every combination, the last one varying fastest. Raises ValueError for another form."""
    axes = []
    for text in sweeps:
        path, equals, values = text.partition("=")
        parts = _parts(values)
        if not equals or not path or not all(parts):
            raise ValueError(f"{text!r} is not of the form path=value,value,…")
        axes.append([(path, value) for value in parts])
    return [dict(one) for one in itertools.product(*axes)]


def _parts(text: str) -> list[str]:
    """Split at commas outside brackets: `{mean: 4, max: 8}` is one value."""
    depth, parts = 0, [""]
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


# --- as a table ----------------------------------------------------------------------------------------------


def to_json(found: Sequence[Swept]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1)


HEADS = (
    "step", "traj/\nmin", "tokens/\ns", "slots\nempty", "trainer\nidle", "in\nflight", "ready", "lag", "max", "dropped",
)  # fmt: skip


def render(found: Sequence[Swept], width: int = 110) -> str:
    """A row a setting; of those that are refused, why below."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    ran = next(one.result for one in found if one.result is not None)
    title = f"{ran.graph}: {ran.steps:,} steps each, {ran.warmup:,} of them not measured"
    table = Table(title=title, title_justify="left", title_style="dim", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in found[0].set:
        parts = name.replace(".", ".\n")
        table.add_column(parts, justify="right", min_width=max(map(len, parts.split("\n"))))
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        table.add_row(*one.set.values(), *(_cells(one.result) if one.result else ["refused"]))
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().strip("\n").splitlines()]
    for one in found:
        if one.refused:
            lines += ["", f"{', '.join(f'{k}={v}' for k, v in one.set.items())}: {one.refused}"]
    return "\n".join(lines) + "\n"


def _cells(s: Simulated) -> list[str]:
    dropped = sum(s.ledger.dropped.values()) / max(1, s.ledger.dispatched)
    return [
        time_text(s.step_seconds), f"{s.per_minute:,.1f}", f"{s.tokens_per_second:,.0f}", f"{s.slots_empty:.1%}",
        f"{s.trainer_idle:.1%}", f"{s.in_flight:,.1f}", f"{s.ready:,.1f}", f"{s.lag.mean:.2f}", f"{s.lag.max}",
        f"{dropped:.1%}",
    ]  # fmt: skip
