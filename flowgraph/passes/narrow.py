"""narrow: integers that are promised to lie in [0, bound) are stored in the smallest unsigned dtype that holds them."""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.sizes import evaluate, smallest_unsigned
from flowgraph.spec.dims import parse
from flowgraph.spec.forms import Wire
from flowgraph.spec.ports import Port
from flowgraph.spec.types import Below, dtype_of


def narrow(graph: Graph) -> Graph:
    def narrowed(node: Node) -> dict[str, Wire]:
        found = {port.name: _narrower(graph, node, port) for port in node.spec.columns}
        return {
            name: msgspec.structs.replace(node.wire(name), dtype=dtype)
            for name, dtype in found.items()
            if dtype
        }

    return graph.rewired(narrowed)


def _narrower(graph: Graph, node: Node, port: Port) -> str | None:
    fact = next((f for f in port.facts if isinstance(f, Below)), None)
    if fact is None or not node.wire(port.name).written:
        return None
    try:
        bound = evaluate(parse(fact.bound), node.kind, graph.dims, "max")
    except KeyError:  # a dim of a model that is not there yet
        return None
    dtype = smallest_unsigned(bound)
    fits = dtype is not None and dtype_of(dtype).itemsize < dtype_of(port.dtype).itemsize
    return dtype if fits else None
