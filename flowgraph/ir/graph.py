"""The graph that every pass reads and writes: nodes with their specs, and the seams between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from flowgraph.engines.registry import EngineOptions
from flowgraph.errors import Place
from flowgraph.learners.registry import LearnerOptions
from flowgraph.spec.dims import Expr, Size
from flowgraph.spec.forms import PLAIN, Wire
from flowgraph.spec.graphfile import GraphFile, InputDecl
from flowgraph.spec.hop import HopSpec
from flowgraph.spec.ports import Port
from flowgraph.spec.types import ROW_KINDS, RowKind


class Binding(msgspec.Struct):
    """One input port, bound.

    via: the hop that the graph names; whose rows the reader follows
    producer: the hop that writes the value (`via` itself, or an ancestor whose column `via` hands on by reference)
    source: the producer's port; None when a whole row stream is bound
    derived: the reader makes the value from others that it reads, so that nothing crosses
    once: what a group's trajectories have in common is read once a group, not once a trajectory
    """

    port: Port
    via: str
    producer: str
    source: Port | None
    decl: InputDecl
    derived: bool = False
    once: bool = False

    @property
    def carries_rows(self) -> bool:
        return self.source is None or self.source.kind == "rows"

    @property
    def flows(self) -> bool:
        """Whether rows, or a column of them, make the reader fire; not an event, nor a value that is sampled."""
        return self.port.mode != "event" and self.port.kind != "value"

    @property
    def is_column(self) -> bool:
        """Whether payload crosses, and not rows by reference or a plain value."""
        return self.source is not None and self.port.kind not in ("rows", "value")


class Node(msgspec.Struct):
    """One hop of the graph.

    kind: the rows it makes or works on; None for a hop that only events fire
    free: nobody said who owns it
    wires: column → what becomes of it, where that is not to be written as it is
    relayed: what it writes passes through the driver's memory, as every other system carries it
    group: the hop with which it fires as one; "" when it fires by itself
    """

    name: str
    spec: HopSpec
    place: Place
    owner: str
    config: dict[str, Any]
    bindings: list[Binding] = []
    kind: RowKind | None = None
    capacity: int | None = None
    free: bool = False
    wires: dict[str, Wire] = {}
    relayed: bool = True
    group: str = ""

    def wire(self, column: str) -> Wire:
        return self.wires.get(column, PLAIN)

    def column(self, name: str) -> Port | None:
        return next((p for p in self.spec.columns if p.name == name), None)

    def binding(self, port: str) -> Binding | None:
        return next((b for b in self.bindings if b.port.name == port), None)


class Owner(msgspec.Struct):
    """One process: its thread count and the resource that it alone holds.

    ranks: dim → among how many processes it splits the work; {} for the one that runs here
    """

    name: str
    place: Place
    threads: int | None = None
    engine: EngineOptions | None = None
    learner: LearnerOptions | None = None
    ranks: dict[str, int] = {}

    @property
    def model(self) -> str | None:
        resource = self.engine or self.learner
        return resource.model if resource else None


class Graph(msgspec.Struct):
    """The whole ring, resolved: names are hops, types are known, nothing has run.

    broken: hops that resolve has findings about, so that nothing can be concluded from what they seem to lack
    doubted: those, and every hop that their rows reach
    max_lag: the largest lag that a back edge tolerates; None without a back edge
    model_dims: sizes that the owners' models have (vocab, layers, …), where `dims:` says nothing of them
    mapped: whether every process maps only the memory that it reads
    """

    file: GraphFile
    owners: dict[str, Owner]
    nodes: dict[str, Node]
    broken: set[str] = set()
    doubted: set[str] = set()
    max_lag: int | None = None
    model_dims: dict[str, Size] = {}
    mapped: bool = False

    @property
    def dims(self) -> dict[str, Size]:
        return {**self.model_dims, **self.file.dims}

    def with_nodes(self, changed: Mapping[str, Node]) -> Graph:
        """This graph with some of its nodes replaced, in the same order."""
        return msgspec.structs.replace(self, nodes={**self.nodes, **changed})

    def rewired(self, choose: Callable[[Node], Mapping[str, Wire]]) -> Graph:
        """This graph with other wires. choose: hop → column → what becomes of it now; the rest stays."""
        chosen = {name: choose(node) for name, node in self.nodes.items()}
        return self.with_nodes(
            {
                name: msgspec.structs.replace(node, wires={**node.wires, **chosen[name]})
                for name, node in self.nodes.items()
                if chosen[name]
            }
        )

    def by_column(self) -> dict[tuple[str, str], list[tuple[Node, Binding]]]:
        """(hop, column) → who reads it, in file order."""
        found: dict[tuple[str, str], list[tuple[Node, Binding]]] = {}
        for node, binding in self.columns():
            if binding.source is not None:
                found.setdefault((binding.producer, binding.source.name), []).append((node, binding))
        return found

    def columns(self) -> Iterator[tuple[Node, Binding]]:
        """Every (node, binding) that payload crosses."""
        return ((n, b) for n in self.nodes.values() for b in n.bindings if b.is_column)

    def upstream(self, node: Node) -> Iterator[Node]:
        """The hops whose rows reach `node`, nearest first; each once, without `node`."""
        seen, queue = {node.name}, deque([node])
        while queue:
            at = queue.popleft()
            for binding in at.bindings:
                if binding.via in seen or not binding.flows:
                    continue
                seen.add(binding.via)
                queue.append(self.nodes[binding.via])
                yield self.nodes[binding.via]

    def doubtful(self, node: Node) -> bool:
        """Whether the rows of a hop may be other than they seem, because it or a hop before it is broken."""
        return node.name in self.doubted

    def option_place(self, node: Node, name: str) -> Place:
        """Where an option stands under `with:`, else the hop."""
        config = self.file.hops[node.name].config
        given = config.value if config is not None and isinstance(config.value, dict) else {}
        return given[name].place if name in given else node.place

    def tokenizer_model(self, owner: str) -> str | None:
        """The model whose tokenizer a hop of this owner gets: the owner's, else the first that any owner names."""
        owners = [self.owners[owner], *self.owners.values()] if owner in self.owners else []
        return next((o.model for o in owners if o.model), None)


def later(a: RowKind | None, b: RowKind | None) -> RowKind | None:
    """The kind that is derived from the other (or the one that is known)."""
    if a is None or b is None:
        return a or b
    return max(a, b, key=ROW_KINDS.index)


def collects(producer: Node, reader: Node) -> bool:
    """Whether the reader's one row is made from many of the producer's: only a step is. A fold reads row by row."""
    return reader.kind == "step" and producer.kind != "step" and reader.spec.facts.kind != "fold"


def repeats(source: Port, producer: Node, port: Port, reader: Node) -> bool:
    """Whether a value without dims is read once a leaf of a trajectory, be it its group's or its own."""
    leaves = tuple(map(str, port.shape)) == ("leaf",)
    return not source.shape and leaves and (reader.kind == "trajectory" or collects(producer, reader))


def is_offsets(dim: Expr) -> bool:
    """`x+1` holds the bounds of x ranges, which shift when rows are joined."""
    terms = dict(dim.terms)
    return len(terms) == 2 and terms.pop((), 0) == 1 and set(terms.values()) == {1}


def joins(dim: Expr) -> bool:
    """Whether values along a dim can be joined: the dim of the whole is the sum, or that of joined ranges."""
    counted = dim.names <= {"leaf", "token"}
    return counted and (is_offsets(dim) or {len(m) for m, _ in dim.terms} == {1})
