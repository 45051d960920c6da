"""Rates: which rows a hop fires on, and how many a step that is; an interval where it depends on data."""

from __future__ import annotations

import math

import msgspec

from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.order import every
from flowgraph.passes.sizes import rows_per_step, size_of


class Rate(msgspec.Struct, frozen=True):
    """What a hop works on in one step. kind: rows of that kind, or the leaves that it maps over.

    low < high where data decides: how many leaves a trajectory has, or how many rows are dropped on the way to a step.
    """

    kind: str
    low: float
    high: float

    def __str__(self) -> str:
        """`64 trajectories a step`, `12 to 24 leaves a step`, `at least 8 groups a step`, `once a step`."""
        if self.kind == "step":
            return "once a step" if self.low == 1 else f"once in {1 / self.low:g} steps"
        many = {"trajectory": "trajectories", "leaf": "leaves"}.get(self.kind, f"{self.kind}s")
        if math.isinf(self.high):
            return f"at least {self.low:g} {many} a step"
        span = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"{span} {many} a step"


def drops(node: Node) -> bool:
    """Whether a fold may let go of rows that will never be trained."""
    return any(p.mode == "event" and p.dtype == "Dropped" for p in node.spec.outputs)


def rates(graph: Graph) -> dict[str, Rate]:
    """Hop → its rate; a hop that only events fire has none. The graph has no findings.

    A step takes `group*sample` trajectories. Where a fold may drop some, those before it make as many more as are
    dropped, which nothing but the data bounds.
    """
    fires = every(graph)
    droppers = [n for n in graph.nodes.values() if drops(n)]
    dropped = {n.name for d in droppers for n in (d, *graph.upstream(d))} - {d.name for d in droppers}
    found = {}
    for name, node in graph.nodes.items():
        if node.kind is not None:
            rows = rows_per_step(node.kind, graph.dims) / fires[name]
            unit, least, most = _unit(graph, node)
            found[name] = Rate(unit, rows * least, math.inf if name in dropped else rows * most)
    return found


def _unit(graph: Graph, node: Node) -> tuple[str, float, float]:
    """What a hop counts, and how many of it one row has at least and at most."""
    assert node.kind is not None
    if node.spec.facts.maps != "leaf":
        return node.kind, 1, 1
    trajectories = rows_per_step("trajectory", graph.dims) if node.kind == "step" else 1.0
    mean, most = (size_of("leaf", graph.dims, which) for which in ("mean", "max"))
    return "leaf", trajectories * (most if mean == most else 1), trajectories * most
