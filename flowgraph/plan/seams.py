"""What crosses each seam, in bytes a step: the edges of the plan, priced from shapes."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.sizes import rows_per_step
from flowgraph.plan.plan import Hop, Seam, SeamField
from flowgraph.spec.types import LIFETIMES


def seams(graph: Graph, hops: dict[str, Hop]) -> Iterator[Seam]:
    """One seam for every (hop, reader) that the graph writes, in file order of the readers."""
    for node in graph.nodes.values():
        for source in dict.fromkeys(b.via for b in node.bindings):
            bindings = [b for b in node.bindings if b.via == source]
            fields = tuple(_field(graph, node, b, hops) for b in bindings if b.is_column)
            control = tuple(b.port.name for b in bindings if not b.is_column)
            producers = {f.producer for f in fields}
            crosses = any(hops[p].owner != node.owner for p in producers)
            lives = [hops[p].lifetime for p in producers] or [hops[source].lifetime]
            yield Seam(
                source=source,
                reader=node.name,
                transport="control" if not fields else "shared memory" if crosses else "in process",
                lifetime=max(lives, key=LIFETIMES.index),
                fields=fields,
                control=control,
                delay=max(b.decl.delay for b in bindings),
                max_lag=next((b.decl.max_lag for b in bindings if b.decl.max_lag is not None), None),
                every=max(b.decl.every for b in bindings),
            )


def _field(graph: Graph, node: Node, binding: Binding, hops: dict[str, Hop]) -> SeamField:
    assert binding.source is not None
    column = hops[binding.producer].column(binding.source.name)
    read = next(r for r in hops[node.name].reads if r.port == binding.port.name)
    # A group's value that every trajectory reads is read once a trajectory, by reference to one copy.
    finest = node.kind if read.gather == "same" else "trajectory"
    every = hops[node.name].every
    mean = column.mean_bytes * rows_per_step(finest, graph.dims, "mean") / every
    bound = column.max_bytes * rows_per_step(finest, graph.dims, "max")
    priced = column.kind != "tensors" or bool(column.tensors)
    return SeamField(
        port=binding.port.name,
        producer=binding.producer,
        column=column.name,
        type=str(binding.port),
        facts=column.facts,
        mean_bytes=mean,
        max_bytes=int(bound),
        priced=priced,
    )
