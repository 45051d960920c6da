"""check: the table of seam checks. Each is a function Graph → findings; none stops another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flowgraph.errors import Diagnostic, Note
from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.spec.dims import Expr
from flowgraph.spec.graphfile import near
from flowgraph.spec.hop import Port
from flowgraph.spec.types import LIFETIMES, ROW_KINDS

# Dims that the ring itself counts; `sizes.py` prices them.
COUNTED = ("group", "sample", "trajectory", "leaf", "token")


def check(graph: Graph) -> list[Diagnostic]:
    """All findings of all checks, in no particular order."""
    return [d for one in CHECKS for d in one(graph)]


def check_dtypes(graph: Graph) -> Iterator[Diagnostic]:
    """FG202: what the writer writes is what the reader reads, dtype and kind."""
    for node, binding in _columns(graph):
        source, port = binding.source, binding.port
        assert source is not None
        if (source.kind, source.dtype) != (port.kind, port.dtype):
            message = f"{binding.producer}.{source.name} is {source}, but {node.name} reads {port.name} as {port}"
            help = f"change the annotation of {port.name} in {node.spec.place.file}, or read another column"
            yield Diagnostic("FG202", binding.decl.place, message, help, _notes(graph, node, binding))


def check_shapes(graph: Graph) -> Iterator[Diagnostic]:
    """FG203: dims agree over every seam, after rows are collected."""
    for node, binding in _columns(graph):
        source, port = binding.source, binding.port
        assert source is not None
        producer = graph.nodes[binding.producer]
        if source.kind != port.kind or shapes_fit(graph, source, producer, port, node):
            continue
        rows = f", collected over the {producer.kind} rows of a {node.kind}" if collects(producer, node) else ""
        message = f"{binding.producer}.{source.name} is {source}{rows}, but {node.name} reads {port.name} as {port}"
        help = f"write the dims of {port.name} as {binding.producer} gives them, in {node.spec.place.file}"
        yield Diagnostic("FG203", binding.decl.place, message, help, _notes(graph, node, binding))


def shapes_fit(graph: Graph, source: Port, producer: Node, port: Port, reader: Node) -> bool:
    """Whether one value of `source` for every row reads as `port`: equal dims, or a scalar repeated along leaf/trajectory."""
    if not collects(producer, reader):
        return _equal(graph, source.shape, port.shape)
    if not source.shape:
        return len(port.shape) == 1 and str(port.shape[0]) in ("leaf", "trajectory", "group")
    counted = source.shape[0].names <= {"leaf", "token"}
    return counted and _equal(graph, source.shape, port.shape)


def collects(producer: Node, reader: Node) -> bool:
    """Whether the reader's one row is made from many of the producer's: only a step is."""
    return reader.kind == "step" and producer.kind != "step"


def _equal(graph: Graph, left: tuple[Expr, ...], right: tuple[Expr, ...]) -> bool:
    def value(e: Expr) -> float | None:
        sizes = {n: float(s.max) for n, s in graph.dims.items() if s.mean == s.max}
        return e.at(sizes) if e.names <= set(sizes) else None

    return len(left) == len(right) and all(
        a == b or (value(a) is not None and value(a) == value(b)) for a, b in zip(left, right, strict=True)
    )


def check_dims(graph: Graph) -> Iterator[Diagnostic]:
    """FG204: every dim that a column or parameter names has a size."""
    known = set(graph.dims) | set(COUNTED)
    said: set[str] = set()
    for node in graph.nodes.values():
        names = [(n, p.name) for p in (*node.spec.columns, *node.spec.inputs) for d in p.shape for n in sorted(d.names)]
        names += [(p.detail, p.name) for p in node.spec.params if p.origin == "dim" and p.required and p.detail not in graph.dims]
        for name, port in names:
            if (name not in known or (name, port) in names[-1:] and name not in graph.dims and name in ("group", "sample")) and name not in said:
                said.add(name)
                message = f"dim {name!r}, which {node.name}.{port} needs, has no size"
                yield Diagnostic("FG204", node.place, message, f"{near(name, graph.dims)}add `{name}: {{mean: …, max: …}}` under dims:")
    for name in ("prompt", "response"):
        uses_token = any("token" in d.names for n in graph.nodes.values() for p in n.spec.columns for d in p.shape)
        if uses_token and "token" not in graph.dims and name not in graph.dims and name not in said:
            message = f"dim {name!r} has no size, and a leaf is prompt+response tokens"
            yield Diagnostic("FG204", graph.file.place, message, f"add `{name}: {{mean: …, max: …}}` under dims:")


def check_rows(graph: Graph) -> Iterator[Diagnostic]:
    """FG403: a row stream is of the kind that the reader takes; nothing reads rows that are made later."""
    for node in graph.nodes.values():
        for binding in node.bindings:
            producer = graph.nodes[binding.producer]
            via = graph.nodes[binding.via]
            if via.kind is None and len(graph.nodes) < len(graph.file.hops):
                continue  # a hop before it could not be read, which has a finding of its own
            if binding.port.kind == "rows" and via.kind != binding.port.row_kind:
                message = f"{binding.via} makes {via.kind or 'no'} rows, but {node.name} takes {binding.port.row_kind} rows"
                yield Diagnostic("FG403", binding.decl.place, message, f"feed {binding.port.name} from a hop that makes {binding.port.row_kind} rows")
            elif (
                binding.source is not None and binding.port.kind not in ("rows", "value")
                and node.kind is not None and producer.kind is not None
                and ROW_KINDS.index(producer.kind) > ROW_KINDS.index(node.kind)
            ):  # fmt: skip
                message = f"{node.name} works on {node.kind} rows, but {binding.producer}.{binding.source.name} exists once a {producer.kind}"
                yield Diagnostic("FG403", binding.decl.place, message, f"move {node.name} behind {binding.producer}")


def check_owners(graph: Graph) -> Iterator[Diagnostic]:
    """FG301: the owner exists and holds the resource that the hop uses; a fold lives on the driver."""
    for node in graph.nodes.values():
        decl = graph.file.hops[node.name]
        place = decl.owner_place or decl.place
        owner = graph.owners.get(node.owner)
        if owner is None:
            help = f"{near(node.owner, graph.owners)}add `{node.owner}: {{}}` under owners:, or set owner: to one of {', '.join(graph.owners)}"
            yield Diagnostic("FG301", place, f"hop {node.name} belongs to {node.owner!r}, which is no owner here", help)
            continue
        if node.spec.facts.kind == "fold" and node.owner != "driver":
            yield Diagnostic("FG301", place, f"fold {node.name} can't live on {node.owner!r}", "remove its owner:; folds run on the driver")
        for param in node.spec.params:
            if param.detail == "tokenizer" and param.origin == "resource":
                if tokenizer_model(graph, node) is None:
                    yield Diagnostic("FG301", place, f"hop {node.name} needs a tokenizer, but no owner names a model", "give an owner an engine with a model")
            elif param.origin == "resource" and getattr(owner, param.detail) is None and _declared(graph, node.owner, param.detail):
                help = f"add `{param.detail}:` to owner {node.owner}, or set owner: to one that has it"
                yield Diagnostic("FG301", place, f"hop {node.name} uses a {param.detail}, and owner {node.owner!r} has none", help)


def _declared(graph: Graph, owner: str, resource: str) -> bool:
    """True when the file declares no such resource (one that is declared but wrong has a finding of its own)."""
    return getattr(graph.file.owners[owner], resource) is None


def tokenizer_model(graph: Graph, node: Node) -> str | None:
    """The model whose tokenizer a hop gets: its owner's, else the first engine's, else the first learner's."""
    owners = [graph.owners[node.owner], *graph.owners.values()] if node.owner in graph.owners else []
    return next((o.model for o in owners if o.model), None)


def check_single_writer(graph: Graph) -> Iterator[Diagnostic]:
    """FG302: one hop publishes a version; one hop of the graph uses a learner to train it."""
    writers = [n for n in graph.nodes.values() if any(p.kind == "value" and p.initial is not None for p in n.spec.outputs)]
    for extra in writers[1:]:
        notes = (Note(writers[0].place, "the first writer"),)
        yield Diagnostic("FG302", extra.place, f"hops {writers[0].name} and {extra.name} both publish a version", "keep one of them", notes)


def check_lifetimes(graph: Graph) -> Iterator[Diagnostic]:
    """FG303: nobody reads a value after it died."""
    for node, binding in _columns(graph):
        producer = graph.nodes[binding.producer]
        life = producer.spec.facts.lifetime
        if producer.kind == node.kind or node.kind is None:
            continue
        needed = "consumed" if node.kind == "step" else "group"
        if LIFETIMES.index(life) < LIFETIMES.index(needed) and not (node.kind == "trajectory" and life in ("trajectory", "group")):
            message = f"{node.name} reads {binding.producer}.{binding.port.name} once a {node.kind}, but it dies with its {life}"
            yield Diagnostic("FG303", binding.decl.place, message, f"declare lifetime=\"{needed}\" for {producer.spec.use}", _notes(graph, node, binding))


def check_cycles(graph: Graph) -> Iterator[Diagnostic]:
    """FG401: every cycle of the ring has a seam that declares a delay. Events and folds' own ledgers are not data."""
    import networkx as nx

    ring = nx.DiGraph()
    for node in graph.nodes.values():
        for binding in node.bindings:
            if binding.port.mode != "event" and not binding.decl.delay and not (binding.port.mode == "latest" and _ledger(graph, binding)):
                ring.add_edge(binding.via, node.name, place=binding.decl.place)
    for component in nx.strongly_connected_components(ring):
        edges = [(a, b) for a, b in ring.edges if a in component and b in component]
        if edges:
            last = max(edges, key=lambda e: ring.edges[e]["place"])
            path = " → ".join([*sorted(component, key=list(graph.nodes).index), sorted(component, key=list(graph.nodes).index)[0]])
            yield Diagnostic("FG401", ring.edges[last]["place"], f"the cycle {path} has no delay", "write the back edge as {from: …, delay: 1, max_lag: 0}")


def _ledger(graph: Graph, binding: Binding) -> bool:
    """A fold's view of its own ledger (free capacity, rows in flight) is read at once and needs no delay."""
    return binding.port.kind == "value" and graph.nodes[binding.producer].spec.facts.kind == "fold"


def check_staleness(graph: Graph) -> Iterator[Diagnostic]:
    """FG402: the staleness bound ceil(N/B) − 1 + Q + o stays within `max_lag`, and every k-th sync can be reached.

    N is what dispatch may admit, at most (max_lag + 1)·B, so what can break the bound is the train queue's depth Q.
    """
    lag = graph.max_lag
    if lag is None:
        return
    for node in graph.nodes.values():
        if node.spec.facts.collect and node.capacity is not None and node.capacity > lag:
            decl = graph.file.hops[node.name]
            message = f"a train queue of {node.capacity} behind {node.name} alone makes rows {node.capacity} versions stale; max_lag is {lag}"
            yield Diagnostic("FG402", decl.capacity_place or decl.place, message, f"set capacity: {lag}, or raise max_lag to {node.capacity}")
        for binding in node.bindings:
            if binding.decl.every > 1 and binding.source is not None and binding.source.kind == "tensors" and binding.decl.every - 1 > lag:
                message = f"weights cross every {binding.decl.every} steps, but max_lag is {lag}: step {lag + 1} would wait for ever"
                yield Diagnostic("FG402", binding.decl.place, message, f"set max_lag: {binding.decl.every - 1}, or every: {lag + 1}")


def check_slots(graph: Graph) -> Iterator[Diagnostic]:
    """FG404: some hop must make rows, and the ring must reach a step, or the run would wait for ever."""
    if not graph.nodes:
        return
    kinds = {n.kind for n in graph.nodes.values() if n.spec.facts.kind == "fold"}
    if "step" not in kinds and len(graph.nodes) == len(graph.file.hops):
        message = "no hop collects trajectories into steps, so a run would never end"
        yield Diagnostic("FG404", graph.file.place, message, "add a batch hop such as hops.batch.oldest_first")


def _columns(graph: Graph) -> Iterator[tuple[Node, Binding]]:
    for node in graph.nodes.values():
        for binding in node.bindings:
            if binding.source is not None and binding.port.kind not in ("rows", "value"):
                yield node, binding


def _notes(graph: Graph, node: Node, binding: Binding) -> tuple[Note, ...]:
    producer = graph.nodes[binding.producer].spec
    return (
        Note(producer.place, f"{producer.use} gives {binding.source and binding.source.name}: {binding.source}"),
        Note(node.spec.place, f"{node.spec.use} takes {binding.port.name}: {binding.port}"),
    )


CHECKS: tuple[Callable[[Graph], Iterator[Diagnostic]], ...] = (
    check_dtypes, check_shapes, check_dims, check_rows, check_owners, check_single_writer, check_lifetimes,
    check_cycles, check_staleness, check_slots,
)  # fmt: skip
