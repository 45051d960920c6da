"""FG3xx, and FG104 of `owners:`: who holds what, who writes it, and how long it lives."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic, Note
from flowgraph.ir.graph import Graph, Node
from flowgraph.learners.protocol import Critic
from flowgraph.passes.companions import life_needed
from flowgraph.spec.reader import near
from flowgraph.spec.types import LIFETIMES


def check_owners(graph: Graph) -> Iterator[Diagnostic]:
    """FG301: the owner exists and holds the resource that the hop uses; a fold lives on the driver."""
    yield from _missing_owners(graph)
    for node in graph.nodes.values():
        decl = graph.file.hops[node.name]
        place = decl.owner_place or decl.place
        if node.owner not in graph.owners:
            continue
        if node.spec.facts.kind == "fold" and node.owner != "driver":
            message = f"fold {node.name} can't live on {node.owner!r}"
            yield Diagnostic("FG301", place, message, "remove its owner:; folds run on the driver")
        for resource in sorted({p.detail for p in node.spec.params if p.origin == "resource"}):
            declared = graph.file.owners[node.owner]
            if resource == "tokenizer" and not _may_have_tokenizer(graph):
                message = f"hop {node.name} needs a tokenizer, but no owner names a model"
                yield Diagnostic("FG301", place, message, "give an owner an engine with a model")
            elif (
                resource != "tokenizer"
                and getattr(declared, resource) is None
                and resource not in declared.partial
            ):
                message = f"hop {node.name} uses a {resource}, and owner {node.owner!r} has none"
                message = message.replace("a engine", "an engine")
                help = f"add `{resource}:` to owner {node.owner}, or set owner: to one that has it"
                yield Diagnostic("FG301", place, message, help)
        yield from _heads(graph, node)


def _heads(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    """Who uses a critic belongs to an owner whose learner has values; who uses a learner, to one without."""
    learner = graph.owners[node.owner].learner
    uses = [p.type for p in node.spec.params if p.detail == "learner"]
    critic = Critic in uses
    if learner is None or not uses or critic == (learner.head == "value"):
        return
    decl = graph.file.hops[node.name]
    at = f"owners.{node.owner}.learner"
    if critic:
        message = f"hop {node.name} uses a critic, and the learner of owner {node.owner!r} gives no values"
        help = f"set head: value under {at}, or set owner: to one that has it"
    else:
        message = f"hop {node.name} uses a learner, and that of owner {node.owner!r} is a critic"
        help = f"remove head: value from {at}, or set owner: to one without"
    yield Diagnostic("FG301", decl.owner_place or decl.place, message, help)


def _missing_owners(graph: Graph) -> Iterator[Diagnostic]:
    """One finding for every `owner:` that names none, and one for a role that several hops have by default."""
    if "owners" in graph.file.partial:
        return
    roles: dict[str, list[Node]] = {}
    for node in graph.nodes.values():
        if node.owner not in graph.owners:
            decl = graph.file.hops[node.name]
            if decl.owner_place is None:
                roles.setdefault(node.owner, []).append(node)
            else:
                message = f"hop {node.name} belongs to {node.owner!r}, which is no owner here"
                yield Diagnostic("FG301", decl.owner_place, message, _add_owner(graph, node.owner))
    if len(roles) > 1 and len(graph.file.owners) == 1:
        message = f"the graph gives no owners, and its hops need {', '.join(roles)}"
        help = f"add owners: with {', '.join(f'{role}: {{}}' for role in roles)}"
        yield Diagnostic("FG301", graph.file.place, message, help)
        return
    for role, nodes in roles.items():
        names = ", ".join(n.name for n in nodes)
        belong = f"hop {names} belongs" if len(nodes) == 1 else f"hops {names} belong"
        message = f"{belong} to {role!r}, which is no owner here"
        yield Diagnostic("FG301", nodes[0].place, message, _add_owner(graph, role))


def _add_owner(graph: Graph, name: str) -> str:
    owners = ", ".join(graph.owners)
    return f"{near(name, graph.owners)}add `{name}: {{}}` under owners:, or set owner: to one of {owners}"


def _may_have_tokenizer(graph: Graph) -> bool:
    """Whether some owner names a model, or would if its own finding were mended."""
    owners = graph.file.owners.values()
    lost = any(n.owner not in graph.owners for n in graph.nodes.values()) or "owners" in graph.file.partial
    return lost or any(o.engine or o.learner or o.partial for o in owners)


def check_unread_owners(graph: Graph) -> Iterator[Diagnostic]:
    """FG104: a process that no hop runs in would hold what it holds for nothing, and its options change nothing."""
    nodes = graph.nodes.values()
    owned = {node.owner for node in nodes}
    # What is unresolved may be its hop; a hop that names no owner has a finding, and may mean this one.
    if graph.broken or graph.file.partial & {"hops", "owners"} or not owned <= set(graph.owners):
        return
    tokenizes = any(
        p.origin == "resource" and p.detail == "tokenizer" for node in nodes for p in node.spec.params
    )
    for name, decl in graph.file.owners.items():
        holds = decl.engine or decl.learner
        unread = decl.partial or (holds and graph.owners[name].model is None)
        if name == "driver" or name in owned or unread or (tokenizes and holds):
            continue
        message = f"no hop belongs to owner {name}"
        help = f"{near(name, sorted(owned))}remove {name}: from owners:, or set owner: {name} for a hop"
        yield Diagnostic("FG104", decl.place, message, help)


def check_single_writer(graph: Graph) -> Iterator[Diagnostic]:
    """FG302: one hop publishes a version; one hop writes the weights of a learner."""
    nodes = graph.nodes.values()
    publish = [n for n in nodes if any(p.kind == "value" and p.initial is not None for p in n.spec.outputs)]
    yield from _second_writers(publish, "publish a version")
    for owner in graph.owners:
        train = [n for n in nodes if n.owner == owner and n.spec.facts.uses == "learner"]
        write = [n for n in train if any(p.kind == "tensors" for p in n.spec.columns)]
        yield from _second_writers(write, f"write the weights of {owner}")


def _second_writers(writers: list[Node], what: str) -> Iterator[Diagnostic]:
    for extra in writers[1:]:
        notes = (Note(writers[0].place, "the first writer"),)
        message = f"hops {writers[0].name} and {extra.name} both {what}"
        yield Diagnostic("FG302", extra.place, message, f"remove {extra.name} or {writers[0].name}", notes)


def check_lifetimes(graph: Graph) -> Iterator[Diagnostic]:
    """FG303: nobody reads a value after it died."""
    for node, binding in graph.columns():
        writer = graph.nodes[binding.producer]
        producer, life, needed = writer.spec, writer.spec.facts.lifetime, life_needed(writer, node)
        if needed is None or graph.doubtful(node):
            continue
        if LIFETIMES.index(life) < LIFETIMES.index(needed):
            value = f"{binding.producer}.{binding.source.name if binding.source else binding.port.name}"
            when = f"once a {node.kind}" if node.kind != writer.kind else f"as long as its {node.kind} waits"
            message = f"{node.name} reads {value} {when}, but it dies with its {life}"
            help = f'declare lifetime="{needed}" for {producer.use}'
            notes = (Note(producer.place, f'{producer.use} has lifetime "{life}"'),)
            yield Diagnostic("FG303", binding.decl.place, message, help, notes)


def check_agreement(graph: Graph) -> Iterator[Diagnostic]:
    """FG304: an engine that gets a learner's weights serves the same model, and samples at its temperature."""
    for node in graph.nodes.values():
        engine = graph.owners[node.owner].engine if node.owner in graph.owners else None
        for binding in node.bindings:
            writer = graph.nodes[binding.producer]
            learner = graph.owners[writer.owner].learner if writer.owner in graph.owners else None
            if engine is None or learner is None or binding.port.kind != "tensors":
                continue
            facts = {"model": (engine.model, learner.model), "dtype": (engine.dtype, learner.given)}
            for fact, (ours, theirs) in facts.items():
                if ours != theirs:
                    gets = f"gets the weights of {theirs} from {writer.owner}"
                    message = f"owner {node.owner} serves {fact} {ours}, and {gets}"
                    own = "weights_dtype" if fact == "dtype" else fact  # the learner may compute in another
                    there = f"{own}: {ours} under owners.{writer.owner}.learner"
                    help = f"set {fact}: {theirs} under owners.{node.owner}.engine, or {there}"
                    yield Diagnostic("FG304", graph.owners[node.owner].place, message, help)
            yield from _temperatures(graph, node.owner, writer.owner, learner.temperature)
    yield from _scores(graph)


def _scores(graph: Graph) -> Iterator[Diagnostic]:
    """FG304: what one learner scores and another trains with, both score at one temperature."""
    for node in graph.nodes.values():
        for binding in node.bindings:
            writer = graph.nodes[binding.producer]
            if not binding.is_column or {node.spec.facts.uses, writer.spec.facts.uses} != {"learner"}:
                continue
            theirs, ours = (_warmth(graph, one.owner) for one in (writer, node))
            if theirs is not None and ours is not None and theirs != ours:
                trains = f"owner {node.owner} trains at {ours:g}"
                message = f"owner {writer.owner} scores at temperature {theirs:g}, and {trains}"
                help = f"set temperature: {ours:g} under owners.{writer.owner}.learner too"
                yield Diagnostic("FG304", binding.decl.place, message, help)


def _warmth(graph: Graph, owner: str) -> float | None:
    """The temperature of an owner's learner, where it scores tokens."""
    learner = graph.owners[owner].learner if owner in graph.owners else None
    return learner.temperature if learner is not None and learner.head != "value" else None


def _temperatures(graph: Graph, owner: str, trainer: str, trained: float) -> Iterator[Diagnostic]:
    """The log-probabilities of both sides are compared, so both are at one temperature."""
    for node in graph.nodes.values():
        option = next((p for p in node.spec.params if p.name == "temperature" and p.origin == "with"), None)
        if option is None or node.owner != owner or node.kind is None:
            continue
        sampled = node.config.get("temperature", option.default)
        if isinstance(sampled, int | float) and sampled != trained:
            message = f"hop {node.name} samples at temperature {sampled:g}, and owner {trainer} trains at {trained:g}"
            help = f"set temperature: {sampled:g} under owners.{trainer}.learner too"
            if sampled <= 0:  # which no learner trains at
                help = f"set temperature: {trained:g} for {node.name}"
            # Where the option is given: one that the hop itself refuses is said there, and is the cause.
            yield Diagnostic("FG304", graph.option_place(node, "temperature"), message, help)
