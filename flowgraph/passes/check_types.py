"""FG2xx and FG5xx: what crosses a seam is what its reader takes, every dim has a size, and the bytes fit."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic, Note
from flowgraph.ir.graph import Binding, Graph, Node, collects, joins, repeats
from flowgraph.passes.fitting import same_type, sole_giver
from flowgraph.passes.sizes import COUNTED, rows_per_step, slots, value_bytes
from flowgraph.spec.dims import Expr
from flowgraph.spec.ports import Port
from flowgraph.spec.reader import near
from flowgraph.spec.types import ROW_KINDS

# Each is part of one of those before it, so what is counted by it can be split by them.
FINER = ("step", "group", "trajectory", "leaf", "token")
ADDRESSABLE = 2**46  # bytes; more than a process can map


def check_dtypes(graph: Graph) -> Iterator[Diagnostic]:
    """FG202: what the writer writes is what the reader reads, dtype and kind."""
    for node in graph.nodes.values():
        for binding in node.bindings:
            source, port = binding.source, binding.port
            if source is None or port.kind == "rows" or same_type(source, port):
                continue
            what = f"{binding.producer}.{source.name} is {_type(source)}"
            message = f"{what}, but {node.name} reads {port.name} as {_type(port)}"
            read = _fitting(graph, node, binding) or "another output"
            help = f"read {read}, or change the annotation of {port.name} in {node.spec.place.file}"
            help = _counted(graph, node, binding) or help
            yield Diagnostic("FG202", binding.decl.place, message, help, _notes(graph, node, binding))


def _counted(graph: Graph, node: Node, binding: Binding) -> str | None:
    """One fix for a plain value: the only output of the type that is asked for, or the type that the writer lacks."""
    source, port = binding.source, binding.port
    if source is None or source.kind != "value" or not port.dtype:
        return None
    if giver := sole_giver(graph, node, port):
        return f"read {port.name} from {giver}"
    if source.dtype in port.wider:
        return f"annotate {binding.producer}.{source.name} as {port.dtype}, if that is what it counts"
    return None


def _type(port: Port) -> str:
    if port.kind != "value":
        return str(port)
    return f"{port.dtype or 'a value'} events" if port.mode == "event" else port.dtype or "a value"


def check_shapes(graph: Graph) -> Iterator[Diagnostic]:
    """FG203: dims agree over every seam, after rows are collected."""
    for node, binding in graph.columns():
        source, port = binding.source, binding.port
        assert source is not None
        producer = graph.nodes[binding.producer]
        fits = shapes_fit(graph, source, producer, port, node)
        if fits or not same_type(source, port) or graph.doubtful(node):
            continue
        rows = (
            f", collected over the {producer.kind} rows of a {node.kind}" if collects(producer, node) else ""
        )
        message = (
            f"{binding.producer}.{source.name} is {source}{rows}, but {node.name} reads {port.name} as {port}"
        )
        help = f"write the dims of {port.name} as {binding.producer} gives them, in {node.spec.place.file}"
        if other := _fitting(graph, node, binding):
            help = f"read {other}, or {help}"
        elif collects(producer, node) and not source.shape:
            help = f"write {port.name} with the dim trajectory or leaf, in {node.spec.place.file}"
        elif collects(producer, node) and not joins(source.shape[0]):
            help = f"read {source.name} before its rows are collected, in a hop on {producer.kind} rows"
        yield Diagnostic("FG203", binding.decl.place, message, help, _notes(graph, node, binding))


def _fitting(graph: Graph, node: Node, binding: Binding) -> str:
    """Another output of the same hop, one that can be read; that of the port's name before all. "" without any."""
    producer, port = graph.nodes[binding.producer], binding.port
    columns = [c for c in producer.spec.columns if c != binding.source and same_type(c, port)]
    fits = [c.name for c in columns if shapes_fit(graph, c, producer, port, node)]
    return f"{producer.name}.{min(fits, key=lambda name: name != port.name)}" if fits else ""


def shapes_fit(graph: Graph, source: Port, producer: Node, port: Port, reader: Node) -> bool:
    """Whether one value of `source` for every row reads as `port`.

    A trajectory's value without dims, or its group's, may be read once a leaf. Else, read row by row, dims are equal.
    Collected over rows, a value without dims becomes one a trajectory, and values along leaves or tokens are joined.
    """
    if repeats(source, producer, port, reader):
        return True
    if not collects(producer, reader):
        return _equal(graph, source.shape, port.shape)
    if not source.shape:
        return tuple(map(str, port.shape)) == ("trajectory",)
    return joins(source.shape[0]) and _equal(graph, source.shape, port.shape)


def _equal(graph: Graph, left: tuple[Expr, ...], right: tuple[Expr, ...]) -> bool:
    return len(left) == len(right) and all(_same(graph, a, b) for a, b in zip(left, right, strict=True))


def _same(graph: Graph, left: Expr, right: Expr) -> bool:
    """Equal as expressions, or in value where every name has one fixed size."""
    fixed = {n: float(s.max) for n, s in graph.dims.items() if s.mean == s.max and n not in COUNTED}
    known = left.names | right.names <= set(fixed)
    return left == right or (known and left.at(fixed) == right.at(fixed))


def check_maps(graph: Graph) -> Iterator[Diagnostic]:
    """FG205: a hop that says it can be split along a dim gives outputs that can be split along it too."""
    for node in graph.nodes.values():
        maps, decl = node.spec.facts.maps, graph.file.hops[node.name]
        if maps is None or node.kind is None:
            continue
        notes = (Note(node.spec.place, f'{node.spec.use} says maps="{maps}"'),)
        ports = (*node.spec.inputs, *node.spec.columns)
        dims = {name for port in ports for dim in port.shape for name in dim.names}
        known = list(dict.fromkeys((*ROW_KINDS, *FINER, *sorted(dims))))
        if maps not in known:
            message = f"{node.name} maps over {maps!r}, which is no row kind and no dim of its ports"
            help = f"{near(maps, known)}known: {', '.join(known)}"
            yield Diagnostic("FG205", decl.use_place, message, help, notes)
            continue
        finer = set(FINER[FINER.index(maps) :]) if maps in FINER else {maps}
        for port in node.spec.outputs if maps != node.kind else ():
            counted = port.shape[0].names if port.shape else frozenset()
            split = port.kind == "scalars" or (counted and counted <= finer)
            if not split:
                message = f"{node.name} maps over {maps}, but gives {port.name}: {port}, which can't be split by {maps}"
                help = f"make the first dim of {port.name} count {maps} rows, or remove maps="
                yield Diagnostic("FG205", decl.use_place, message, help, notes)


def check_memory(graph: Graph) -> Iterator[Diagnostic]:
    """FG501: what a hop may hold at once, and what its readers may read in a step, can be addressed at all."""
    for node in graph.nodes.values():
        rows = max(slots(graph, node), rows_per_step(node.kind, graph.dims))
        for port in node.spec.columns:
            try:
                held = value_bytes(port, node.kind, graph.dims, "max") * rows if port.kind != "tensors" else 0
            except KeyError:
                continue
            if held > ADDRESSABLE:
                used = {name for dim in port.shape for name in dim.names}
                counted = {n for name in used for n in COUNTED.get(name, (name,))} | used & set(
                    graph.file.dims
                )
                names = sorted(counted | {"group", "sample"})
                message = (
                    f"{node.name}.{port.name} may take {held:.3g} bytes at once, more than a process can map"
                )
                help = f"lower the bound of one of {', '.join(names)} under dims:, or max_lag"
                yield Diagnostic("FG501", node.place, message, help)


def _notes(graph: Graph, node: Node, binding: Binding) -> tuple[Note, ...]:
    producer, source = graph.nodes[binding.producer].spec, binding.source
    assert source is not None
    return (
        Note(producer.place, f"{producer.use} gives {source.name}: {_type(source)}"),
        Note(node.spec.place, f"{node.spec.use} takes {binding.port.name}: {_type(binding.port)}"),
    )
