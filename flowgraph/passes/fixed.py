"""Parameters that are not the user's to set under `with:`: they come from dims, seams and the run."""

from __future__ import annotations

from flowgraph.ir.graph import Graph, Node
from flowgraph.spec.hop import Param


def fixed(graph: Graph, node: Node) -> dict[str, int]:
    """Parameter → value, for those that the graph has a value for."""
    values = {p.name: fixed_value(graph, node, p) for p in node.spec.params}
    return {name: value for name, value in values.items() if value is not None}


def fixed_value(graph: Graph, node: Node, param: Param) -> int | None:
    """A seam's fact is that of the hop's own input, and `max_lag` else the largest of the graph."""
    if param.origin == "dim" and param.detail in graph.dims:
        return graph.dims[param.detail].max
    if param.origin == "run":
        return int(getattr(graph.file.run, param.detail))
    if param.origin != "seam":
        return None
    binding = node.binding(param.detail)
    value: int | None = getattr(binding.decl, param.fact) if binding is not None else None
    return graph.max_lag if value is None and param.fact == "max_lag" else value
