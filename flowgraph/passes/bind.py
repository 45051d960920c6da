"""Binding inputs: row streams and plain values to the hop that is named, columns to the hop that writes them.

A hop that is named gives its own columns and, by reference, those of every hop that its rows come from.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from flowgraph.errors import Diagnostic, Place
from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.columns import Columns
from flowgraph.passes.fitting import same_type, sole_giver
from flowgraph.passes.move import too_late
from flowgraph.spec.config import convert_value, is_callable
from flowgraph.spec.graphfile import NAME, HopDecl, InputDecl
from flowgraph.spec.ports import Port
from flowgraph.spec.reader import guess, near, plural, suggest, surely


def bind(graph: Graph, node: Node, found: list[Diagnostic]) -> None:
    """Bind row streams and values now; columns wait until every row stream is known."""
    decl = graph.file.hops[node.name]
    ports = {p.name: p for p in node.spec.inputs}
    needed = [p.name for p in node.spec.inputs if not p.optional]
    meant = guess(decl.inputs, ports, needed)
    for name, given in decl.inputs.items():
        if name not in ports:
            message = f"hop {decl.name} ({decl.use}) has no input {name!r}"
            found.append(Diagnostic("FG109", given.at, message, suggest(name, meant, "inputs", ports)))
        port = ports.get(meant.get(name, name))
        if port is not None:
            _bind_input(graph, node, port, given, found)
    _mark(graph, node)


def _mark(graph: Graph, node: Node) -> None:
    """A hop is broken when an input is missing without which its rows are unknown."""
    bound = {b.port.name for b in node.bindings}
    flows = [p for p in node.spec.inputs if p.mode != "event" and p.kind != "value"]
    lost = [p for p in flows if p.name not in bound and not p.optional]
    if any(p.kind == "rows" for p in lost) or (lost and len(lost) == len(flows)):
        graph.broken.add(node.name)


def _bind_input(graph: Graph, node: Node, port: Port, given: InputDecl, found: list[Diagnostic]) -> None:
    hop, _, column = given.ref.partition(".")
    hops = graph.file.hops
    if hop not in hops:
        _no_hop(graph, hop, given, found)
        hop = surely(hop, hops) or hop
    if hop not in graph.nodes:
        graph.broken.add(node.name)
        return
    source = _direct(graph.nodes[hop], port, column)
    if port.kind in ("rows", "value") and source is None:
        message = f"{given.ref} gives no {port} for input {port.name!r} of hop {node.name}"
        outputs = graph.nodes[hop].spec.outputs
        gives = ", ".join(f"{p.name}: {p}" for p in outputs if p.kind != "scalars") or "nothing"
        giver = sole_giver(graph, node, port)
        help = f"read {port.name} from {giver}; " if giver else f"name a hop that gives {port}; "
        found.append(Diagnostic("FG109", given.place, message, f"{help}{hop} gives {gives}"))
        return
    node.bindings.append(Binding(port, hop, hop, source, given))


def _no_hop(graph: Graph, hop: str, given: InputDecl, found: list[Diagnostic]) -> None:
    """One finding for each unknown name, at the first input that has it."""
    hops = graph.file.hops
    known = any(not NAME.fullmatch(name) for name in hops)  # a name that can't be referred to has a finding
    if not given.ref or known or "hops" in graph.file.partial:
        return
    uses = [i.place for h in hops.values() for i in h.inputs.values() if i.ref.partition(".")[0] == hop]
    if given.place == uses[0]:
        count = f", which {len(uses)} inputs name" if len(uses) > 1 else ""
        help = f"{near(hop, hops)}hops: {', '.join(hops)}"
        found.append(Diagnostic("FG108", given.place, f"there is no hop {hop!r}{count}", help))


def _direct(producer: Node, port: Port, column: str) -> Port | None:
    """The producer's own port for a row stream, a value or a named column."""
    outputs = (*producer.spec.outputs, *producer.spec.columns)
    if port.kind == "rows":
        rows = [p for p in outputs if p.kind == "rows" and column in ("", p.name)]
        if not rows and _works_on_rows(producer) and not column and port.mode != "latest":
            return Port(
                name="rows", kind="rows", row_kind=port.row_kind
            )  # its own rows, checked by kind later
        fitting = [
            p for p in rows if p.row_kind == port.row_kind and (p.mode == "latest") == (port.mode == "latest")
        ]
        return next((p for p in fitting if p.name == port.name), next(iter(fitting), None))
    if port.kind == "value":
        values = [p for p in outputs if p.kind == "value"]
        # A hop that returns one value has no name for it; a named one is not taken for another.
        return next((p for p in values if p.name in ((column,) if column else (port.name, "out"))), None)
    return next((p for p in outputs if p.name == column), None) if column else None


def _works_on_rows(node: Node) -> bool:
    """Whether a hop's own rows can be handed on: it is no fold, and more than events fire it."""
    flows = any(p.mode != "event" and p.kind != "value" for p in node.spec.inputs)
    return node.spec.facts.kind != "fold" and flows


def bind_columns(graph: Graph, found: list[Diagnostic]) -> None:
    """Find the writer of every column; a binding without one is reported, and left out unless another was meant."""
    columns = Columns(graph)
    for name in list(graph.broken):
        _doubt(graph, columns, name)
    for node in graph.nodes.values():
        kept = []
        for binding in node.bindings:
            if binding.port.kind not in ("rows", "value"):
                writer = _writer(graph, columns, binding)
                if writer is None:
                    if graph.doubtful(graph.nodes[binding.via]):
                        graph.broken.add(node.name)
                        continue
                    known = _known(graph, binding)
                    found.append(_no_column(graph, node, binding, known))
                    meant = surely(_name(binding), known)
                    if meant is None:
                        continue
                    writer = known[meant]
                binding.producer, binding.source = writer
            kept.append(binding)
        node.bindings = kept
        _mark(graph, node)
        if node.name in graph.broken:
            _doubt(graph, columns, node.name)


def _doubt(graph: Graph, columns: Columns, name: str) -> None:
    """What a broken hop's rows reach is doubtful; each hop becomes so once."""
    queue = [name] if name in graph.nodes and name not in graph.doubted else []
    while queue:
        graph.doubted.update(queue)
        queue = list(
            dict.fromkeys(f for at in queue for f in columns.followers[at] if f not in graph.doubted)
        )


def _name(binding: Binding) -> str:
    return binding.decl.ref.partition(".")[2] or binding.port.name


def _writer(graph: Graph, columns: Columns, binding: Binding) -> tuple[str, Port] | None:
    """The hop and port that an input reads, through the hop that is named; its own columns first.

    The value that a hop returns without a name goes by that of the port that reads it, unless a hop before it has
    one of that name and only that one is of the port's type.
    """
    via, port = graph.nodes[binding.via], binding.port
    own = next((c for c in via.spec.columns if c.name == "out"), None)
    other = columns.writer(via.name, port.name) or graph.doubtful(via)
    if own is not None and not binding.decl.ref.partition(".")[2] and (same_type(own, port) or not other):
        return via.name, own
    return columns.writer(via.name, _name(binding))


def _known(graph: Graph, binding: Binding) -> dict[str, tuple[str, Port]]:
    """All that can be read through the hop that is named: name → (writer, port), its own columns first."""
    via = graph.nodes[binding.via]
    known: dict[str, tuple[str, Port]] = {}
    for at in (via, *graph.upstream(via)):
        for column in at.spec.columns:
            known.setdefault(column.name, (at.name, column))
    return known


def _no_column(graph: Graph, node: Node, binding: Binding, known: dict[str, tuple[str, Port]]) -> Diagnostic:
    name = _name(binding)
    message = f"nothing at or before hop {binding.via} gives {name!r}, which {node.name} reads"
    later = too_late(graph, node, binding.port.name, name, graph.nodes[binding.via])
    help = later or f"{near(name, known)}known there: {', '.join(known) or 'nothing'}"
    return Diagnostic("FG109", binding.decl.place, message, help)


def check_needs(graph: Graph) -> Iterator[Diagnostic]:
    """FG110: every input that a hop needs is given, and so is the optional one that an option reads."""
    for node in graph.nodes.values():
        decl = graph.file.hops[node.name]
        needed = [p.name for p in node.spec.inputs if not p.optional]
        meant = guess(decl.inputs, [p.name for p in node.spec.inputs], needed).values()
        missing = [p for p in node.spec.inputs if not p.optional and p.name not in (*decl.inputs, *meant)]
        if missing and "in" not in decl.partial:
            what = ", ".join(f"{p.name}: {p}" for p in missing)
            help = f"add {', '.join(f'{p.name}: {_giver(graph, node, p)}' for p in missing)} under in:"
            message = f"hop {decl.name} lacks its input{plural(missing)} {what}"
            yield Diagnostic("FG110", decl.place, message, help)
        for given, what, port in _read_by_options(node, decl):
            if port in decl.inputs or "in" in decl.partial:
                continue
            message = f"hop {node.name} lacks its input {port}, which {what} reads"
            later = too_late(graph, node, port, port, node)
            before = [n.name for n in graph.upstream(node) if any(c.name == port for c in n.spec.columns)]
            wanted = next((p for p in node.spec.inputs if p.name == port), None)
            giver = _giver(graph, node, wanted) if wanted is not None else "<hop>"
            giver = before[0] if giver == "<hop>" and before else giver
            help = f"add {port}: {giver} under in:"
            yield Diagnostic("FG110", given, message, later or help)
        yield from _unread(graph, node) if not graph.broken and "hops" not in graph.file.partial else ()


def _read_by_options(node: Node, decl: HopDecl) -> Iterator[tuple[Place, str, str]]:
    """Options and inputs that say nothing without an optional port: where each stands, what it is, and the port."""
    options = decl.config.value if decl.config is not None else {}
    for case, port in node.spec.facts.needs:
        option, _, value = case.partition("=")
        chosen = node.config.get(option)
        if option in decl.inputs:
            yield decl.inputs[option].place, f"its input {option}", port
        elif chosen == value if value else chosen:
            yield options[option].place, case.replace("=", ": "), port
    optional = {p.name for p in node.spec.inputs if p.optional}
    for param in node.spec.params:
        if is_callable(param.type) and param.name in node.config:
            with contextlib.suppress(Exception):  # it was made before, and what it raised was told
                made = convert_value(node.config[param.name], param.type)
                place = options[param.name].place
                yield from ((place, f"its {param.name}", p) for p in made.reads if p in optional)


def _unread(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    """FG110: what a hop gives in place of something else is read, or that would be lost without a word."""
    read = {
        b.source.name
        for n in graph.nodes.values()
        for b in n.bindings
        if b.source and b.producer == node.name
    }
    for name in node.spec.facts.read:
        if name in read:
            continue
        takers = [n.name for n in graph.nodes.values() if any(p.name == name for p in n.spec.inputs)]
        message = f"nobody reads {name} of {node.name}, and what it stands for would be lost"
        where = f"under in: of {takers[0]}" if takers else "in the hop that it is for"
        yield Diagnostic("FG110", node.place, message, f"add {name}: {node.name} {where}")


def _giver(graph: Graph, node: Node, port: Port) -> str:
    """What can be written for an input: the first hop that gives just that and comes before; `<hop>` without one."""
    for other in graph.nodes.values():
        facts = other.spec.facts
        given = {(p.name, p.kind, p.dtype) for p in (*other.spec.outputs, *other.spec.columns)}
        fits = (port.name, port.kind, port.dtype) in given
        if port.kind == "rows" and port.mode != "latest":
            # Trajectories go through hops that each add to them, and which of those is meant is not to be told.
            handed = any(
                p.handed and p.name == port.name and p.row_kind == port.row_kind for p in other.spec.outputs
            )
            hears = port.mode == "event" and node.spec.facts.collect  # a batch, of what is sent
            makes = facts.expand if hears else facts.collect
            fits = handed or port.row_kind in (facts.source, makes[1] if makes else None)
        loops = port.mode == "queue" and node in graph.upstream(other)
        if fits and other is not node and not loops:
            # Columns are handed on: the hop that most inputs name gives this one too, when it comes after its writer.
            vias = Counter(b.via for b in node.bindings if b.is_column and port.kind not in ("rows", "value"))
            names = (via for via, _ in vias.most_common() if other in graph.upstream(graph.nodes[via]))
            return next(names, other.name)
        back = any(param.origin == "seam" and param.detail == port.name for param in node.spec.params)
        if back and any(p.initial is not None for p in other.spec.outputs):
            return f"{{from: {other.name}, delay: 1, max_lag: 0}}"
    return "<hop>"
