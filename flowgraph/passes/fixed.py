"""Parameters that are not the user's to set under `with:`: they come from dims, seams and the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowgraph.ir.graph import Graph, Node
from flowgraph.spec.config import build_config
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


def ask(
    graph: Graph, node: Node, fact: Callable[..., int] | None, *args: Any, config: Mapping[str, Any]
) -> int | None:
    """What a function that a decorator names says, called with all parameters of its hop. config: the hop's `with:`

    None without one, and when it can't be said without a resource or with a wrong option, which has its own finding.
    """
    if fact is None:
        return None
    spec = node.spec
    given = {p.name: p.default for p in spec.params if not p.required} | fixed(graph, node)
    try:
        built = build_config(spec, dict(config))
        if spec.facts.validate is not None:
            spec.facts.validate(**built)
        return int(fact(*args, **(given | built)))
    except Exception:  # a user's code
        return None
