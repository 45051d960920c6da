"""The plan of a graph as a single-controller framework carries it: what the compiled one is compared with.

Every array is padded to the bounds of its dims (there are as many leaves as ever), in the dtype that its hop gives it;
every column is written, whether anybody reads it or not, and all pass through the controller. Weights do not: such
frameworks send them from trainer to engines past it.
"""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Graph
from flowgraph.passes.rewrite import PASSES, rewrite
from flowgraph.plan.lower import lower
from flowgraph.plan.plan import Plan
from flowgraph.spec.dims import Size


def naive_plan(graph: Graph) -> Plan:
    """The graph has no findings. Text and JSON are not padded: they keep their means."""
    dims = {name: size if name == "leaf" else Size(size.max, size.max) for name, size in graph.dims.items()}
    file = msgspec.structs.replace(graph.file, dims=dims)
    written = rewrite(msgspec.structs.replace(graph, file=file), PASSES)
    past = {
        name: msgspec.structs.replace(node, relayed=False)
        for name, node in written.nodes.items()
        if any(port.kind == "tensors" for port in node.spec.columns)
    }
    return lower(written.with_nodes(past))
