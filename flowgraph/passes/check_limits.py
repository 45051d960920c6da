"""FG111: the time limit of one trajectory ends before the deadline of the run, which ends everything."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph


def check_limits(graph: Graph) -> Iterator[Diagnostic]:
    """FG111: what may take `time_limit` seconds is given up before it has run for `run.deadline`."""
    deadline = graph.file.run.deadline
    for node in graph.nodes.values():
        option = next((p for p in node.spec.params if p.name == "time_limit" and p.origin == "with"), None)
        limit = node.config.get("time_limit", option.default) if option is not None else None
        if isinstance(limit, int | float) and limit >= deadline:
            what = f"hop {node.name} gives a trajectory {limit:g} s, and the run ends when one takes {deadline:g} s"
            help = f"set time_limit below {deadline:g}, or run.deadline above {limit:g}"
            yield Diagnostic("FG111", graph.option_place(node, "time_limit"), what, help)
