"""What every pass must leave true, as a table. A pass that breaks one is a fault of flowgraph, not of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.companions import reachable, row_bytes
from flowgraph.spec.forms import ports_of
from flowgraph.spec.types import Derivable


def verify(name: str, before: Graph, after: Graph) -> None:
    """Raises AssertionError naming the pass and the first rule that it broke."""
    for rule in RULES:
        for what in rule(before, after):
            raise AssertionError(f"pass {name}: {rule.__name__.replace('_', ' ').strip()}: {what}")


def the_wiring_is_as_it_was(before: Graph, after: Graph) -> Iterator[str]:
    if list(before.nodes) != list(after.nodes):
        yield "hops came or went"
    for a, b in _changed(before, after):
        if [_edge(one) for one in a.bindings] != [_edge(one) for one in b.bindings] or a.kind != b.kind:
            yield f"{a.name} reads otherwise"


def _changed(before: Graph, after: Graph) -> list[tuple[Node, Node]]:
    """Hops as they were and as they are. A pass leaves alone what it does not change."""
    pairs = zip(before.nodes.values(), after.nodes.values(), strict=False)
    return [(a, b) for a, b in pairs if a is not b]


def _edge(binding: Binding) -> tuple[str, str, str, str]:
    return binding.port.name, binding.via, binding.producer, binding.source.name if binding.source else ""


def only_free_hops_move(before: Graph, after: Graph) -> Iterator[str]:
    for a, b in _changed(before, after):
        if a.owner != b.owner and (not a.free or a.spec.facts.kind == "fold" or b.owner not in after.owners):
            yield f"{a.name} moved from {a.owner} to {b.owner}"


def what_is_read_can_be_had(before: Graph, after: Graph) -> Iterator[str]:
    for reader, binding in after.columns():
        assert binding.source is not None
        writer = after.nodes[binding.producer]
        wire = writer.wire(binding.source.name)
        if binding.derived:
            yield from _derivable(reader, binding)
        elif not wire.written and not (writer.group and writer.group == reader.group):
            yield f"{reader.name} reads {writer.name}.{binding.source.name}, which is not written"
        elif wire.written and not reachable(after, writer, ports_of(wire.form), reader):
            yield f"{reader.name} can't undo {wire.form} of {writer.name}.{binding.source.name}"


def _derivable(reader: Node, binding: Binding) -> Iterator[str]:
    assert binding.source is not None
    fact = next(f for f in binding.source.facts if isinstance(f, Derivable))
    read = [b for b in reader.bindings if b.producer == binding.producer and not b.derived]
    own = {b.source.name for b in read if b.source}
    if missing := set(fact.sources) - own:
        yield f"{reader.name} can't derive {binding.source.name} without {', '.join(sorted(missing))}"


def hops_of_a_group_fire_alike(before: Graph, after: Graph) -> Iterator[str]:
    for node in after.nodes.values():
        if not node.group:
            continue
        head = after.nodes[node.group]
        if (node.owner, node.kind) != (head.owner, head.kind) or node.spec.facts.kind == "fold":
            yield f"{node.name} is not like {head.name}"


def no_seam_gets_heavier(before: Graph, after: Graph) -> Iterator[str]:
    for a, b in _changed(before, after):
        for port in (p for p in b.spec.columns if p.kind != "tensors"):
            was, now = row_bytes(before, a, port), row_bytes(after, b, port)
            if now > was + 1e-9:
                yield f"{b.name}.{port.name} went from {was:g} to {now:g} bytes a row"


RULES: tuple[Callable[[Graph, Graph], Iterator[str]], ...] = (
    the_wiring_is_as_it_was,
    only_free_hops_move,
    what_is_read_can_be_had,
    hops_of_a_group_fire_alike,
    no_seam_gets_heavier,
)
