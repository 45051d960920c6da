"""What training is told in several places agrees: the learner of an owner, the loss, the options of hops and `dims:`.

Each of these would end a run in its midst, or be passed over in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from flowgraph.errors import Diagnostic, Place
from flowgraph.ir.graph import Graph, Node
from flowgraph.learners.protocol import Critic
from flowgraph.passes.fixed import fixed
from flowgraph.passes.options import refused
from flowgraph.passes.staleness import batch_size
from flowgraph.spec.config import build_config, is_callable


def check_training(graph: Graph) -> Iterator[Diagnostic]:
    for node in graph.nodes.values():
        decl = graph.file.hops[node.name]
        learns, taken = node.spec.facts.uses == "learner", _taken(graph, node)
        config = _built(node) if (learns or taken) and "with" not in decl.partial else None
        if config is None:
            continue
        yield from _fixed(graph, node, config, taken)
        if learns:
            yield from _loss(graph, node, config)
            yield from _minibatches(graph, node, config)
            yield from _frozen(graph, node)
            yield from _schedule(graph, node, config)


def _built(node: Node) -> dict[str, Any] | None:
    """The options of a hop as its own types; None where they have findings of their own."""
    try:
        built = build_config(node.spec, node.config)
        if node.spec.facts.validate is not None:
            node.spec.facts.validate(**built)
    except Exception:  # a user's code, and what it raised was told
        return None
    return built


def _taken(graph: Graph, node: Node) -> dict[str, int]:
    """What comes from dims, seams and the run, and a hop's own check takes."""
    validate = node.spec.facts.validate
    names = inspect.signature(validate).parameters if validate is not None else ()
    return {name: value for name, value in fixed(graph, node).items() if name in names}


def _fixed(
    graph: Graph, node: Node, config: Mapping[str, Any], taken: Mapping[str, int]
) -> Iterator[Diagnostic]:
    """FG111: what a hop's own check says once it knows that too."""
    validate = node.spec.facts.validate
    if validate is None or not taken:
        return
    try:
        validate(**config, **taken)
    except Exception as error:  # a user's function
        yield refused(graph.file.hops[node.name], error)


def _loss(graph: Graph, node: Node, config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """FG111 and FG407: a loss reads what the hop's learner has, and the hop reads what the loss does."""
    critic = any(p.type is Critic for p in node.spec.params)
    for param in node.spec.params:
        loss = config.get(param.name)
        if loss is None or not is_callable(param.type) or not hasattr(loss, "values"):
            continue  # no function that `token_loss` marked
        if loss.values != critic:
            what = f"hops.{node.name}.with.{param.name}: the loss"
            if critic:
                message = f"{what} reads log-probabilities, and a critic has none"
                help = "give one that is marked token_loss(values=True)"
            else:
                message = f"{what} reads values, and only a critic has them"
                help = "give one that reads log-probabilities, such as hops.loss.policy_gradient"
            yield Diagnostic("FG111", graph.option_place(node, param.name), message, help)
        old = node.binding("old")
        if old is not None and not loss.before:
            message = f"{node.name} is given old, and its {param.name} compares with the rollout"
            help = f"remove old: from its in:, or set old: train under {param.name}"
            yield Diagnostic("FG407", old.decl.place, message, help)


def _minibatches(graph: Graph, node: Node, config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """FG111: each part of a batch has a trajectory at least."""
    batch = next((n for n in graph.upstream(node) if n.spec.facts.collect), None)
    parts = config.get("minibatches", 1)
    if batch is None or graph.doubtful(node):
        return
    size = batch_size(graph, batch)
    if parts > size:
        message = f"hop {node.name} cuts a step of {size} trajectories into {parts} minibatches"
        help = f"set minibatches to at most {size}, or raise dims.group or dims.sample"
        yield Diagnostic("FG111", graph.option_place(node, "minibatches"), message, help)


def _frozen(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    """FG301: a frozen learner takes no step."""
    learner = graph.owners[node.owner].learner if node.owner in graph.owners else None
    if learner is None or not learner.frozen or not node.spec.trains:
        return
    message = f"hop {node.name} takes steps, and the learner of owner {node.owner!r} is frozen"
    help = f"give owners.{node.owner}.learner lr: in place of frozen: true, or set owner: to one that trains"
    decl = graph.file.hops[node.name]
    yield Diagnostic("FG301", decl.owner_place or decl.place, message, help)


def _schedule(graph: Graph, node: Node, config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """FG106: the rate is not 0 before the run ends."""
    learner = graph.owners[node.owner].learner if node.owner in graph.owners else None
    if learner is None or learner.total_steps is None or not node.spec.trains:
        return
    runs = graph.file.run.steps
    times = {name: config[name] for name in ("minibatches", "epochs") if config.get(name, 1) > 1}
    steps = runs
    for count in times.values():
        steps *= count
    if steps > learner.total_steps:
        made = "".join(f" × {count} {name}" for name, count in times.items())
        what = f"owners.{node.owner}.learner: the rate is 0 behind step {learner.total_steps}"
        message = f"{what}, and {node.name} takes {steps} ({runs} run.steps{made})"
        yield Diagnostic("FG106", _place(graph, node.owner), message, f"set total_steps: {steps}")


def _place(graph: Graph, owner: str) -> Place:
    given = graph.file.owners[owner].learner
    assert given is not None
    place: Place = given.value["total_steps"].place
    return place
