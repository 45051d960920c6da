"""resolve: import every hop, read its signature, bind every input to the hop and port that writes it."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from flowgraph.engines.registry import ENGINES, TransformersOptions
from flowgraph.errors import Diagnostic, ModelError
from flowgraph.ir.graph import Binding, Graph, Node, Owner, later
from flowgraph.learners.registry import LEARNERS, TorchOptions
from flowgraph.models import resolve as resolve_model
from flowgraph.spec.graphfile import GraphFile, HopDecl, OwnerDecl, near
from flowgraph.spec.hop import HopSpec, HopTypeError, Param, Port, read_spec
from flowgraph.spec.source import Located


def resolve(file: GraphFile) -> tuple[Graph, list[Diagnostic]]:
    """Graph file → graph. What can't be resolved is reported and left out, so that later checks still see the rest."""
    found: list[Diagnostic] = []
    owners = {name: _owner(decl, found) for name, decl in file.owners.items()}
    nodes: dict[str, Node] = {}
    for name, decl in file.hops.items():
        spec = _spec(decl, found)
        if spec is not None:
            config = _config(decl, spec, found)
            owner = decl.owner or spec.facts.owner or ""
            nodes[name] = Node(name, spec, decl.place, owner, config, capacity=decl.capacity)
    graph = Graph(file, owners, nodes)
    for node in nodes.values():
        _bind(graph, node, file.hops[node.name], found)
    _bind_columns(graph, found)
    _infer_kinds(graph)
    _place_free(graph)
    return graph, found


# --- owners and specs ------------------------------------------------------------------------------------------


def _owner(decl: OwnerDecl, found: list[Diagnostic]) -> Owner:
    owner = Owner(decl.name, decl.place, decl.threads)
    if decl.engine is not None:
        owner.engine = _options(decl.engine, f"owners.{decl.name}.engine", TransformersOptions, ENGINES, found)
    if decl.learner is not None:
        owner.learner = _options(decl.learner, f"owners.{decl.name}.learner", TorchOptions, LEARNERS, found)
    return owner


def _options(node: Located, what: str, kind: Any, known: tuple[str, ...], found: list[Diagnostic]) -> Any:
    if not isinstance(node.value, dict):
        return None
    use = node.value.get("use")
    if use is None or use.value not in known:
        message = f"{what} names no `use`" if use is None else f"{what}: unknown {use.value!r}"
        place = use.place if use else node.place
        found.append(Diagnostic("FG107", place, message, f"{near(str(use and use.value), known)}supported: {', '.join(known)}"))
        return None
    fields = [f for f in kind.__struct_fields__]
    bad = False
    for key, value in node.value.items():
        if key != "use" and key not in fields:
            bad = True
            help = f"{near(key, fields)}options: {', '.join(fields)}"
            found.append(Diagnostic("FG104", node.keys[key], f"unknown option {key!r} in {what}", help))
        elif key != "use":
            wanted = typing.get_type_hints(kind)[key]
            try:
                msgspec.convert(value.plain(), wanted)
            except msgspec.ValidationError as error:
                bad = True
                found.append(Diagnostic("FG106", value.place, f"{what}.{key}: {error}", f"mend the value of {key}"))
    if bad:
        return None
    try:
        options = msgspec.convert(node.plain(), kind)
        resolve_model(options.model)
        return options
    except msgspec.ValidationError as error:
        found.append(Diagnostic("FG106", node.place, f"{what}: {error}", "mend or add the option named"))
    except ModelError as error:
        found.append(Diagnostic("FG113", node.value["model"].place, error.message, error.help or "name a model"))
    return None


def import_object(path: str) -> Any:
    """The object at a dotted import path. Raises ImportError that says how far it got."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError(f"{path!r} is no import path")
    owner = importlib.import_module(module)
    if not hasattr(owner, name):
        known = [n for n in dir(owner) if not n.startswith("_")]
        raise ImportError(f"module {module} has no {name!r}; {near(name, known)}".rstrip("; ").rstrip())
    return getattr(owner, name)


def _spec(decl: HopDecl, found: list[Diagnostic]) -> HopSpec | None:
    if not decl.use:
        return None
    try:
        return read_spec(decl.use, import_object(decl.use))
    except HopTypeError as error:
        found.append(Diagnostic("FG201", decl.use_place, error.what, error.help))
    except Exception as error:  # a user's module may raise anything while it is imported
        message = f"can't import {decl.use}: {type(error).__name__}: {error}"
        found.append(Diagnostic("FG107", decl.use_place, message, "give an import path such as hops.reward.score"))
    return None


# --- configuration ---------------------------------------------------------------------------------------------


def _config(decl: HopDecl, spec: HopSpec, found: list[Diagnostic]) -> dict[str, Any]:
    """The plain, serialisable values of `with:`, checked against the parameters of the hop."""
    given = decl.config.value if decl.config is not None and isinstance(decl.config.value, dict) else {}
    open_params = {p.name: p for p in spec.params if p.origin == "with"}
    values: dict[str, Any] = {}
    clean = True
    for name, node in given.items():
        place = decl.config.keys[name] if decl.config else decl.place
        if name not in open_params:
            clean = False
            fixed = next((p for p in spec.params if p.name == name), None)
            help = f"{near(name, open_params)}options: {', '.join(open_params) or 'none'}"
            if fixed is not None:
                help = f"it comes from {'dims.' + fixed.detail if fixed.origin == 'dim' else fixed.origin}; set it there"
            found.append(Diagnostic("FG111", place, f"hop {decl.name} ({decl.use}) has no option {name!r}", help))
            continue
        problem = _value_problem(node, open_params[name])
        if problem:
            clean = False
            found.append(Diagnostic("FG111", node.place, f"hops.{decl.name}.with.{name}: {problem}", f"mend the value of {name}"))
        values[name] = node.plain()
    for param in open_params.values():
        if param.required and param.name not in given:
            clean = False
            found.append(Diagnostic("FG111", decl.place, f"hop {decl.name} needs the option {param.name!r}", f"add {param.name}: under with:"))
    if clean and spec.facts.validate is not None:
        try:
            spec.facts.validate(**build_config(spec, values))
        except (ValueError, TypeError) as error:
            place = decl.config.place if decl.config else decl.place
            found.append(Diagnostic("FG111", place, f"hop {decl.name}: {error}", "mend the options under with:"))
    return values


def _value_problem(node: Located, param: Param) -> str:
    try:
        convert_value(node.plain(), param.type)
    except (msgspec.ValidationError, ImportError, TypeError, ValueError) as error:
        return str(error)
    return ""


def build_config(spec: HopSpec, values: dict[str, Any]) -> dict[str, Any]:
    """`with:` values as the hop's own Python types: import paths become objects."""
    types = {p.name: p.type for p in spec.params if p.origin == "with"}
    return {name: convert_value(value, types[name]) for name, value in values.items()}


def convert_value(value: Any, wanted: Any) -> Any:
    """A plain value as `wanted`. For a callable: an import path, or {use: path, …} for a factory and its arguments."""
    base = typing.get_origin(wanted) or wanted
    if base is not Callable and base is not typing.get_origin(Callable[..., Any]):
        return msgspec.convert(value, wanted)
    if isinstance(value, str):
        made = import_object(value)
    elif isinstance(value, dict) and isinstance(value.get("use"), str):
        made = import_object(value["use"])(**{k: v for k, v in value.items() if k != "use"})
    else:
        raise TypeError(f"{value!r} is no import path and no mapping with `use:`")
    if not callable(made):
        raise TypeError(f"{value!r} is not callable")
    return made


# --- inputs ----------------------------------------------------------------------------------------------------


def _bind(graph: Graph, node: Node, decl: HopDecl, found: list[Diagnostic]) -> None:
    """Bind row streams and values now; columns wait until every row stream is known."""
    ports = {p.name: p for p in node.spec.inputs}
    for name, given in decl.inputs.items():
        if name not in ports:
            help = f"{near(name, ports)}inputs: {', '.join(ports) or 'none'}"
            found.append(Diagnostic("FG109", given.at, f"hop {decl.name} ({decl.use}) has no input {name!r}", help))
            continue
        hop, _, column = given.ref.partition(".")
        if hop not in graph.nodes:
            if hop and hop not in graph.file.hops:
                help = f"{near(hop, graph.file.hops)}hops: {', '.join(graph.file.hops)}"
                found.append(Diagnostic("FG108", given.place, f"there is no hop {hop!r}", help))
            continue
        port, producer = ports[name], graph.nodes[hop]
        source = _direct(producer, port, column)
        if port.kind in ("rows", "value") and source is None:
            message = f"{given.ref} gives no {port} for input {name!r} of hop {decl.name}"
            outs = ", ".join(f"{p.name}: {p}" for p in producer.spec.outputs) or "nothing"
            found.append(Diagnostic("FG109", given.place, message, f"{hop} gives {outs}"))
            continue
        node.bindings.append(Binding(port, hop, hop, source, given))
    for port in node.spec.inputs:
        if port.name not in decl.inputs and not port.optional:
            found.append(
                Diagnostic("FG110", decl.place, f"hop {decl.name} lacks its input {port.name!r}: {port}", f"add {port.name}: <hop> under in:")
            )


def _direct(producer: Node, port: Port, column: str) -> Port | None:
    """The producer's own port for a row stream, a value or a named column."""
    outputs = (*producer.spec.outputs, *producer.spec.columns)
    if column:
        return next((p for p in outputs if p.name == column), None)
    if port.kind == "rows":
        rows = [p for p in outputs if p.kind == "rows" and p.row_kind == port.row_kind]
        same_mode = [p for p in rows if (p.mode == "latest") == (port.mode == "latest")]
        exact = [p for p in same_mode if p.name == port.name]
        if not rows and producer.spec.facts.kind != "fold":
            return Port(name="rows", kind="rows", row_kind=port.row_kind)  # its own rows, checked by kind later
        return next(iter(exact or same_mode), None)
    if port.kind == "value":
        values = [p for p in outputs if p.kind == "value"]
        return next((p for p in values if p.name == port.name), values[0] if len(values) == 1 else None)
    return None


def upstream(graph: Graph, node: Node) -> Iterator[Node]:
    """The hops whose rows reach `node`, nearest first; each once."""
    seen, queue = {node.name}, [node]
    while queue:
        at = queue.pop(0)
        for binding in at.bindings:
            if binding.port.mode == "event" or binding.port.kind == "value":
                continue
            if binding.via not in seen:
                seen.add(binding.via)
                queue.append(graph.nodes[binding.via])
                yield graph.nodes[binding.via]


def _bind_columns(graph: Graph, found: list[Diagnostic]) -> None:
    for node in graph.nodes.values():
        kept = []
        for binding in node.bindings:
            if binding.port.kind in ("rows", "value") or _find_column(graph, binding):
                kept.append(binding)
            elif not _follows_a_broken_hop(graph, graph.nodes[binding.via]):
                found.append(_no_column(graph, node, binding))
        node.bindings = kept


def _find_column(graph: Graph, binding: Binding) -> bool:
    via = graph.nodes[binding.via]
    _, _, wanted = binding.decl.ref.partition(".")
    name = wanted or binding.port.name
    for at in (via, *upstream(graph, via)):
        for column in at.spec.columns:
            if column.name == name:
                binding.producer, binding.source = at.name, column
                return True
    single = via.spec.columns
    if not wanted and len(single) == 1 and single[0].name == "out":
        binding.source = single[0]
        return True
    return False


def _follows_a_broken_hop(graph: Graph, via: Node) -> bool:
    """Whether a hop that might give the column could not be read; that has a finding of its own."""
    at = [via, *upstream(graph, via)]
    refs = {given.ref.partition(".")[0] for node in at for given in graph.file.hops[node.name].inputs.values()}
    return any(ref in graph.file.hops and ref not in graph.nodes for ref in refs)


def _no_column(graph: Graph, node: Node, binding: Binding) -> Diagnostic:
    via = graph.nodes[binding.via]
    known = [c.name for at in (via, *upstream(graph, via)) for c in at.spec.columns]
    name = binding.decl.ref.partition(".")[2] or binding.port.name
    message = f"nothing at or before hop {binding.via} gives {name!r}, which {node.name} reads"
    return Diagnostic("FG109", binding.decl.place, message, f"{near(name, known)}known there: {', '.join(known) or 'nothing'}")


def _infer_kinds(graph: Graph) -> None:
    """A fold says what it makes; any other hop works on the most derived rows that it reads."""
    for node in graph.nodes.values():
        facts = node.spec.facts
        change = facts.collect or facts.expand
        node.kind = facts.source or (change[1] if change else None)
    for _ in graph.nodes:  # a chain of n hops settles in at most n rounds
        before = [n.kind for n in graph.nodes.values()]
        for node in graph.nodes.values():
            facts = node.spec.facts
            if facts.source or facts.expand or facts.collect:
                continue
            for binding in node.bindings:
                if binding.port.mode != "event" and binding.port.kind != "value":
                    node.kind = later(node.kind, graph.nodes[binding.via].kind)
        if before == [n.kind for n in graph.nodes.values()]:
            return


def _place_free(graph: Graph) -> None:
    """A hop without an owner goes where its output is read, so that no seam is crossed for it; else to the driver."""
    for node in reversed(list(graph.nodes.values())):
        if not node.owner:
            owners = [n.owner for n, b in graph.readers(node.name) if n.owner and not b.carries_rows]
            workers = [o for o in owners if o != "driver"]
            node.owner = next(iter(workers or owners), "driver")

