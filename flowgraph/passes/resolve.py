"""resolve: import every hop, read its signature, bind every input to the hop and port that writes it."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter

import msgspec

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Binding, Graph, Node, Owner, later
from flowgraph.models import facts
from flowgraph.passes.bind import bind, bind_columns, check_needs
from flowgraph.passes.cycles import check_cycles, undelayed
from flowgraph.passes.options import read_config, read_owner
from flowgraph.passes.unify import unify
from flowgraph.spec.config import import_object
from flowgraph.spec.dims import Size
from flowgraph.spec.graphfile import GraphFile, HopDecl
from flowgraph.spec.hop import HopSpec, read_spec
from flowgraph.spec.ports import HopTypeError
from flowgraph.spec.reader import near

MODEL_DIMS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "experts", "top_k", "moe_layers", "index_top_k",
)  # fmt: skip


def resolve(file: GraphFile) -> tuple[Graph, list[Diagnostic]]:
    """Graph file → graph. What can't be resolved is reported and left out, so that later checks still see the rest."""
    found: list[Diagnostic] = []
    owners = {name: read_owner(decl, found) for name, decl in file.owners.items()}
    graph = Graph(file, owners, {}, model_dims=model_dims(owners))
    read: dict[str, HopSpec | Diagnostic] = {}
    for name, decl in file.hops.items():
        spec = _spec(decl, read, found)
        if spec is None:
            graph.broken.add(name)
            continue
        config = read_config(decl, spec, found)
        owner = decl.owner or spec.facts.owner
        # A hop that nobody places is on the driver, where other systems run it, until the pass `place` moves it.
        graph.nodes[name] = Node(
            name, spec, decl.place, owner or "driver", config, capacity=decl.capacity, free=owner is None
        )
    for node in graph.nodes.values():
        bind(graph, node, found)
    cycles = undelayed(graph)
    found += check_cycles(graph, cycles)
    back = {id(binding) for cycle in cycles for binding in cycle.back}
    _infer_kinds(graph, back)
    for node in graph.nodes.values():
        if any((id(b) in back and b.flows) or _wrong_rows(graph, b) for b in node.bindings):
            graph.broken.add(node.name)
    bind_columns(graph, found)
    found += unify(graph)
    found += check_needs(graph)
    lags = (b.decl.max_lag for n in graph.nodes.values() for b in n.bindings if b.decl.max_lag is not None)
    graph.max_lag = max(lags, default=None)
    return graph, found


def model_dims(owners: Mapping[str, Owner]) -> dict[str, Size]:
    """What the owners' models say of themselves: vocab, layers, hidden, …; of several models the largest counts."""
    found: dict[str, Size] = {}
    for model in dict.fromkeys(o.model for o in owners.values() if o.model):
        known = facts(model)
        for name in MODEL_DIMS if known else ():
            value = getattr(known, name)
            if value and value > found.get(name, Size(0, 0)).max:
                found[name] = Size(value, value)
    return found


def _spec(decl: HopDecl, read: dict[str, HopSpec | Diagnostic], found: list[Diagnostic]) -> HopSpec | None:
    """What `use:` names; a function that many hops use is read once, and said of each when it can't be."""
    if not decl.use:
        return None
    if decl.use not in read:
        read[decl.use] = _read(decl)
    spec = read[decl.use]
    if isinstance(spec, HopSpec):
        return spec
    found.append(msgspec.structs.replace(spec, place=decl.use_place))
    return None


def _read(decl: HopDecl) -> HopSpec | Diagnostic:
    try:
        return read_spec(decl.use, import_object(decl.use))
    except HopTypeError as error:
        return Diagnostic(error.code, decl.use_place, error.what, error.help)
    except ImportError as error:
        message = f"can't import {decl.use}: {error}"
        return Diagnostic("FG107", decl.use_place, message, _instead(error))
    except Exception as error:  # a user's module may raise anything while it is imported
        message = f"can't import {decl.use}: {type(error).__name__}: {error}"
        return Diagnostic("FG107", decl.use_place, message, "mend the module, so that it can be imported")


def _instead(error: ImportError) -> str:
    """One fix: the module of the same package whose name is nearest, when the module is missing."""
    package = (error.name or "").rpartition(".")[0]
    paths = getattr(sys.modules.get(package), "__path__", None)
    known = [f"{package}.{m.name}" for m in pkgutil.iter_modules(paths)] if paths else []
    hint = near(error.name, known) if error.name else ""
    return f"{hint}give an import path such as hops.reward.score"


def _infer_kinds(graph: Graph, back: set[int]) -> None:
    """A fold says what it makes; any other hop works on the most derived rows that it reads.

    Those of a back edge do not count: they would be an earlier turn's. Without them no rows flow in a cycle.
    """
    feeds = {
        n.name: [b.via for b in n.bindings if b.flows and id(b) not in back] for n in graph.nodes.values()
    }
    for name in TopologicalSorter(feeds).static_order():
        node, facts = graph.nodes[name], graph.nodes[name].spec.facts
        change = facts.collect or facts.expand
        made = facts.source or (change[1] if change else None)
        for via in feeds[name] if made is None else ():
            node.kind = later(node.kind, graph.nodes[via].kind)
        node.kind = made or node.kind


def _wrong_rows(graph: Graph, binding: Binding) -> bool:
    """Whether a row stream is of another kind than its reader takes, which the check reports."""
    return (
        binding.port.kind == "rows"
        and binding.flows
        and graph.nodes[binding.via].kind != binding.port.row_kind
    )
