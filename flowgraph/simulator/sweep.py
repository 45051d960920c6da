"""A sweep: one simulation for every combination of values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowgraph.ir.graph import Node
from flowgraph.plan.plan import Plan
from flowgraph.simulator.outcome import Simulated
from flowgraph.simulator.run import simulate_plan
from flowgraph.simulator.settings import NAMES, make

Swept = list[tuple[dict[str, str], Simulated]]


def sweep(
    planned: Callable[[list[str]], Plan],
    nodes: Mapping[str, Node],
    sweeps: Sequence[str],
    steps: int,
    settings: Mapping[str, Any],
) -> Swept:
    """What was set, and what came of it. planned: the plan of the graph with overrides `path=value`; nodes: its hops.

    sweeps: `path=value,value,…` each, where path is that of an override, `hop.option`, or the name of a setting.
    Raises ValueError for another form, and what `planned` and `simulate_plan` raise.
    """
    found: Swept = []
    for at in _combinations(sweeps):
        overrides = [f"{_path(name, nodes)}={value}" for name, value in at.items() if name not in NAMES]
        changed = {name: value for name, value in at.items() if name in NAMES}
        found.append((at, simulate_plan(planned(overrides), steps, make({**settings, **changed}))))
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
