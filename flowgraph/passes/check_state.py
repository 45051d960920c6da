"""FG305 and FG306: no hop keeps what it does not declare, and nothing that is kept grows with the run."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic, Note
from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.rates import drops
from flowgraph.spec.hidden import hidden, method_of
from flowgraph.spec.hop import HopSpec
from flowgraph.spec.types import RowKind

FOR_EVER = ("durable", "run")


def check_hidden(graph: Graph) -> Iterator[Diagnostic]:
    """FG305: a hop or fold keeps nothing outside its inputs and its state, so that it can be replayed.

    It is said once for each function. An effect has a resource, and so a state, by its own word.
    """
    uses = {
        n.spec.use: n
        for n in reversed(graph.nodes.values())
        if n.spec.facts.kind != "effect" and not n.spec.facts.described
    }
    for node in uses.values():
        spec = node.spec
        notes = (Note(spec.place, "it is declared here"),)
        for how, help in _kept_by(spec):
            message = f"{spec.facts.kind} {spec.use} {how}"
            yield Diagnostic("FG305", graph.file.hops[node.name].use_place, message, help, notes)


def _kept_by(spec: HopSpec) -> Iterator[tuple[str, str]]:
    """(how a function keeps something, the fix)."""
    if owner := method_of(spec.function):
        help = "make it a function; state belongs in a @fold, and an option under with:"
        yield f"is a method of an object, a {owner}, that outlives a firing", help
    for name, how in hidden(spec.function).items():
        state = (
            f"move {name} into its state"
            if spec.facts.kind == "fold"
            else f"make it a @fold with {name} in its state"
        )
        help = f"{state}, or take {name} as an option under with:"
        if name in (*(p.name for p in spec.inputs), *(p.name for p in spec.params)):
            help = f"write {name}: … = None, and make a new one in the function"
        yield how, help


def check_leaks(graph: Graph) -> Iterator[Diagnostic]:
    """FG306: what is kept of each row is let go at some time of the run."""
    for node in graph.nodes.values():
        life = node.spec.facts.lifetime
        if node.kind is not None and node.spec.columns and life in FOR_EVER:
            message = (
                f"{node.name} keeps a block of each {node.kind} for the whole run, however many there are"
            )
            needed = "version" if node.kind == "step" else "consumed"
            notes = (Note(node.spec.place, f'{node.spec.use} has lifetime "{life}"'),)
            help = f'declare lifetime="{needed}" for {node.spec.use}'
            yield Diagnostic("FG306", graph.file.hops[node.name].use_place, message, help, notes)
    if not graph.broken and "hops" not in graph.file.partial:
        yield from _never_told(graph)
        yield from _never_taken(graph)


def _never_told(graph: Graph) -> Iterator[Diagnostic]:
    """A fold that makes or keeps rows of a kind learns which of them another fold drops."""
    for dropper in graph.nodes.values():
        kinds = {p.row_kind for p in dropper.spec.inputs if p.kind == "rows" and p.mode != "event"}
        output = next((p.name for p in dropper.spec.outputs if p.dtype == "Dropped"), "")
        for node in graph.nodes.values() if drops(dropper) else ():
            port = next(
                (p.name for p in node.spec.inputs if p.dtype == "Dropped" and p.mode == "event"), None
            )
            if node is dropper or port is None or node.binding(port) is not None or not kinds & _kept(node):
                continue
            kind = next(iter(sorted(k for k in kinds & _kept(node) if k)))
            message = (
                f"{dropper.name} drops {kind} rows, and {node.name} is never told: it keeps them for ever"
            )
            ref = dropper.name if output == port else f"{dropper.name}.{output}"
            yield Diagnostic("FG306", node.place, message, f"add it to {node.name}: in: {{{port}: {ref}}}")


def _kept(node: Node) -> set[RowKind | None]:
    """Kinds of the rows that a fold counts: those that it makes of others, and those of its queues that it hands on."""
    facts = node.spec.facts
    if facts.expand:
        return {facts.expand[1]}
    queues = {p.row_kind for p in node.spec.inputs if p.kind == "rows" and p.mode == "queue"}
    return queues if not facts.collect else set()


def _never_taken(graph: Graph) -> Iterator[Diagnostic]:
    """Rows that are made reach a hop that collects them, unless the graph has none, which is said elsewhere."""
    batches = [n for n in graph.nodes.values() if n.spec.facts.collect]
    taken = {n.name for batch in batches for n in graph.upstream(batch)}
    for node in graph.nodes.values() if batches else ():
        expand = node.spec.facts.expand
        if expand and node.name not in taken:
            message = f"{node.name} makes {expand[1]} rows that no batch ever takes"
            help = f"feed a batch from it, such as {batches[0].name}, or remove it"
            yield Diagnostic("FG306", node.place, message, help)
