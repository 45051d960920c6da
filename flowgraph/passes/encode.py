"""encode: what is promised of a column's content is not sent. Masks are bits, shared prefixes are there once, and
what a reader can derive from other columns that it reads does not cross at all.
"""

from __future__ import annotations

import msgspec

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.companions import closure, pays, tells
from flowgraph.passes.ranks import on_ranks
from flowgraph.passes.sizes import size_of
from flowgraph.spec.facts import companions
from flowgraph.spec.forms import Bits, Form, Prefix, Wire, ports_of
from flowgraph.spec.ports import Port
from flowgraph.spec.types import Derivable, Mask, Shared


def encode(graph: Graph) -> Graph:
    return _derive(_form(graph))


def _form(graph: Graph) -> Graph:
    read = graph.by_column()

    def formed(node: Node) -> dict[str, Wire]:
        wires: dict[str, Wire] = {}
        for port in node.spec.columns:
            wire = node.wire(port.name)
            form = _fitting(graph, node, port) if wire.written and wire.form is None else None
            readers = [reader for reader, _ in read.get((node.name, port.name), ())]
            if (
                isinstance(form, Prefix)
                and node.kind == "step"
                and any(on_ranks(graph, n) for n in (node, *readers))
            ):
                continue  # a rank has no use for what other rows begin with
            if form is not None and pays(graph, node, port, Wire(form=form), readers):
                wires[port.name] = Wire(form=form)
        return wires

    return graph.rewired(formed)


def _fitting(graph: Graph, node: Node, port: Port) -> Form | None:
    for fact in port.facts:
        if isinstance(fact, Mask) and port.shape:
            return Bits()
        # Leaves are known to share their prompt, other rows to share nothing, as a single leaf does: those would only
        # carry the counts besides.
        if isinstance(fact, Shared) and len(port.shape) == 1 and fact.dim == "leaf" and not tells(port):
            several = size_of("leaf", graph.dims, "max") > 1
            return Prefix(companions(node.spec, port, fact)[0]) if several else None
    return None


def _derive(graph: Graph) -> Graph:
    """Bindings whose value the reader makes itself; a column that every reader makes itself is not written."""
    kept = _companions(graph)
    changed: dict[str, Node] = {}
    for (writer, column), readers in graph.by_column().items():
        node = graph.nodes[writer]
        port = node.column(column)
        fact = next((f for f in port.facts if isinstance(f, Derivable)), None) if port else None
        if fact is None or (writer, column) in kept or not node.wire(column).written:
            continue
        able = [(r, b) for r, b in readers if _has(changed.get(r.name, r), writer, fact)]
        if node.kind == "step":  # of a batch's sources a rank has its own trajectories' only
            able = [(r, b) for r, b in able if not on_ranks(graph, r)]
        if able:  # what others are made of has to cross
            kept |= {(writer, source) for source in fact.sources}
        for reader, binding in able:
            reader = changed.get(reader.name, reader)
            bindings = [_derived(b) if b.port == binding.port else b for b in reader.bindings]
            changed[reader.name] = msgspec.structs.replace(reader, bindings=bindings)
        if able and len(able) == len(readers):
            node = changed.get(writer, node)
            wires = node.wires | {column: msgspec.structs.replace(node.wire(column), written=False)}
            changed[writer] = msgspec.structs.replace(node, wires=wires)
    return graph.with_nodes(changed)


def _companions(graph: Graph) -> set[tuple[str, str]]:
    """Columns that some form takes to be undone; those stay as they are."""
    found = set()
    for node in graph.nodes.values():
        for wire in node.wires.values():
            found |= {(at.name, port.name) for at, port in closure(graph, node, ports_of(wire.form))}
    return found


def _has(reader: Node, writer: str, fact: Derivable) -> bool:
    """Whether a reader reads every source of a column, and none of them is derived in its turn."""
    own = {b.source.name for b in reader.bindings if b.producer == writer and b.source and not b.derived}
    return own.issuperset(fact.sources) and reader.spec.facts.kind != "fold"


def _derived(binding: Binding) -> Binding:
    return msgspec.structs.replace(binding, derived=True)
