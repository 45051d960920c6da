"""FG204, and FG104 and FG106 of `dims:`: what hops name has a size, and what has a size is named by a hop."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph, Node
from flowgraph.models import facts
from flowgraph.passes.resolve import MODEL_DIMS
from flowgraph.passes.sizes import COUNTED, evaluate
from flowgraph.spec.dims import parse
from flowgraph.spec.graphfile import MADE, WHOLE
from flowgraph.spec.reader import closest, near
from flowgraph.spec.types import Below

# What the ring itself counts and prices by, whether or not a hop names it.
RINGS = {*WHOLE, *MADE, *COUNTED, *(name for names in COUNTED.values() for name in names)}


def check_dims(graph: Graph) -> Iterator[Diagnostic]:
    """FG204: every dim that hops name has a size, and no expression over them is negative. FG104: each is named. FG207:
    what is a model's has the size that the model has.
    """
    if "dims" in graph.file.partial:
        return
    yield from _not_the_models(graph)
    missing: dict[str, tuple[Node, str]] = {}
    for node in graph.nodes.values():
        for name, user in _dims_of(node):
            for needed in COUNTED.get(name, (name,)) if name not in graph.dims else ():
                if needed not in graph.dims:
                    counted = f" for {name!r}" if needed != name else ""
                    missing.setdefault(needed, (node, f"{node.name}.{user} needs it{counted}"))
        yield from _negative(graph, node)
    if missing and not graph.dims:
        message = f"the graph gives no sizes, and its hops need {', '.join(missing)}"
        help = f"add dims: with {', '.join(f'{name}: {{mean: …, max: …}}' for name in missing)}"
        yield Diagnostic("FG204", graph.file.place, message, help)
        return
    for name, (node, why) in missing.items():
        hint = _of_model(graph) if name in MODEL_DIMS else near(name, (*graph.dims, *MODEL_DIMS))
        help = f"{hint}add `{name}: {{mean: …, max: …}}` under dims:"
        yield Diagnostic("FG204", node.place, f"dim {name!r} has no size, and {why}", help)
    if not missing:  # else it is one of those, under another name
        yield from _unread(graph)


def _not_the_models(graph: Graph) -> Iterator[Diagnostic]:
    """FG207: a size of a model under `dims:` that no owner's model has."""
    for name in MODEL_DIMS:
        if name not in graph.file.dims or name not in graph.model_dims:
            continue
        models = dict.fromkeys(owner.model for owner in graph.owners.values() if owner.model)
        has = {
            model: value for model in models if (known := facts(model)) and (value := getattr(known, name))
        }
        size = graph.file.dims[name]
        if size.max not in has.values():
            each = " and ".join(f"{model} has {value}" for model, value in has.items())
            message = f"dims.{name} is {size.max:g}, and {each}"
            help = f"remove {name}: from dims:, it is the model's; or give another dim of yours another name"
            yield Diagnostic("FG207", graph.file.dim_places[name], message, help)


def _of_model(graph: Graph) -> str:
    """What gives a graph the numbers of a model."""
    unseen = [owner.model for owner in graph.owners.values() if owner.model and facts(owner.model) is None]
    return f"flowgraph pull {unseen[0]}, or " if unseen else "name a model that has it, or "


def _dims_of(node: Node) -> Iterator[tuple[str, str]]:
    """(dim, port or parameter that needs it). An optional input that nothing is wired to needs none."""
    given = [p for p in node.spec.inputs if not p.optional or node.binding(p.name) is not None]
    for port in (*node.spec.columns, *given):
        for dim in port.shape:
            yield from ((name, port.name) for name in sorted(dim.names))
        for fact in port.facts:
            # A promise about what a model has is of use where the model is known.
            names = parse(fact.bound).names - set(MODEL_DIMS) if isinstance(fact, Below) else ()
            yield from ((name, port.name) for name in sorted(names))
    for param in node.spec.params:
        if param.origin == "dim" and param.required:
            yield param.detail, param.name


def _negative(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    for port in (*node.spec.columns, *node.spec.inputs):
        for dim in port.shape:
            try:
                least = evaluate(dim, node.kind, graph.dims, "max")
            except KeyError:
                continue
            if least < 0:
                message = f"{node.name}.{port.name} is {port}, and {dim} is {least:g}"
                yield Diagnostic("FG204", node.place, message, f"make the dims of {dim} larger")


def _unread(graph: Graph) -> Iterator[Diagnostic]:
    """Sizes that nothing is priced by, and that would only look as if something were."""
    if graph.broken or graph.file.partial & {"hops", "dims"}:
        return
    named = {name for node in graph.nodes.values() for name in _names_of(node)}
    for name in graph.file.dims:
        if name in RINGS or name in named:
            continue
        known = sorted(named | RINGS - {*MADE})
        meant = closest(name, [one for one in known if one not in graph.file.dims]) or closest(name, known)
        hint = f"did you mean {meant}? " if meant else ""
        message = f"dims.{name} is the size of nothing: no port and no parameter of a hop names it"
        yield Diagnostic("FG104", graph.file.dim_places[name], message, f"{hint}remove {name}: from dims:")


def _names_of(node: Node) -> Iterator[str]:
    for port in (*node.spec.columns, *node.spec.inputs):
        for dim in port.shape:
            yield from dim.names
        for fact in port.facts:
            yield from parse(fact.bound).names if isinstance(fact, Below) else ()
    yield from (param.detail for param in node.spec.params if param.origin == "dim")


def check_tokens(graph: Graph) -> Iterator[Diagnostic]:
    """FG106: the tokens of a leaf, where they are given, have room for its prompt and a response."""
    dims = graph.file.dims
    if not {"token", "prompt", "response"} <= set(dims):
        return
    token, prompt, response = (dims[name] for name in ("token", "prompt", "response"))
    mean, most = prompt.mean + response.mean, prompt.max + response.max
    if token.mean < mean or token.max < most:
        less = f"less than prompt+response, of mean {mean:g} and max {most}"
        message = f"dims.token has mean {token.mean:g} and max {token.max}, {less}"
        help = "remove token: from dims:, and it is prompt+response"
        yield Diagnostic("FG106", graph.file.dim_places["token"], message, help)
