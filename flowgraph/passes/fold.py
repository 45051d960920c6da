"""fold: what is constant crosses once: a value spread over a row's tokens, a value that a group's trajectories share.

The reader spreads it out again with the bounds and the mask that the writer had. When it does not read them anyway,
they cross besides; so the pass is taken only where that is less.
"""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Binding, Graph, Node, collects
from flowgraph.passes.companions import pays, tells
from flowgraph.spec.facts import companions
from flowgraph.spec.forms import PerRow, Wire, ports_of
from flowgraph.spec.ports import Port
from flowgraph.spec.types import LastToken, TiledOver


def fold(graph: Graph) -> Graph:
    return _once(_per_row(graph))


def _once(graph: Graph) -> Graph:
    """A step reads what its trajectories have from their group once a group."""
    changed = {}
    for node in graph.nodes.values():
        bindings = [_shared(graph, node, b) for b in node.bindings]
        if bindings != node.bindings:
            changed[node.name] = msgspec.structs.replace(node, bindings=bindings)
    return graph.with_nodes(changed)


def _shared(graph: Graph, node: Node, binding: Binding) -> Binding:
    writer = graph.nodes[binding.producer]
    once = binding.is_column and writer.kind == "group" and collects(writer, node)
    return msgspec.structs.replace(binding, once=True) if once else binding


def _per_row(graph: Graph) -> Graph:
    read = graph.by_column()

    def folded(node: Node) -> dict[str, Wire]:
        wires: dict[str, Wire] = {}
        taken: set[str] = set()  # what forms take stays as it is, so that no two take each other
        for port in node.spec.columns:
            wire = _folded(node, port) if port.name not in taken else None
            readers = [reader for reader, _ in read.get((node.name, port.name), ())]
            if wire is not None and readers and pays(graph, node, port, wire, readers):
                wires[port.name] = wire
                taken.update(ports_of(wire.form))
        return wires

    return graph.rewired(folded)


def _folded(node: Node, port: Port) -> Wire | None:
    fact = next((f for f in port.facts if isinstance(f, LastToken | TiledOver)), None)
    if fact is None or len(port.shape) != 1 or tells(port) or not node.wire(port.name).written:
        return None
    bounds, mask = companions(node.spec, port, fact)
    return Wire(form=PerRow(fact.dim, bounds, mask, isinstance(fact, LastToken)))
