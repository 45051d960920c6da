"""The graph that every pass reads and writes: nodes with their specs, and the seams between them."""

from __future__ import annotations

from typing import Any

import msgspec

from flowgraph.engines.registry import EngineOptions
from flowgraph.errors import Place
from flowgraph.learners.registry import LearnerOptions
from flowgraph.spec.dims import Size
from flowgraph.spec.graphfile import GraphFile, InputDecl
from flowgraph.spec.hop import HopSpec, Port
from flowgraph.spec.types import ROW_KINDS, RowKind


class Binding(msgspec.Struct):
    """One input port, bound.

    via: the hop that the graph names; whose rows the reader follows
    producer: the hop that writes the value (`via` itself, or an ancestor whose column `via` hands on by reference)
    source: the producer's port; None when a whole row stream is bound
    """

    port: Port
    via: str
    producer: str
    source: Port | None
    decl: InputDecl

    @property
    def carries_rows(self) -> bool:
        return self.source is None or self.source.kind == "rows"


class Node(msgspec.Struct):
    """One hop of the graph. kind: the rows it makes or works on; None for a hop that only events fire."""

    name: str
    spec: HopSpec
    place: Place
    owner: str
    config: dict[str, Any]
    bindings: list[Binding] = []
    kind: RowKind | None = None
    capacity: int | None = None

    def binding(self, port: str) -> Binding | None:
        return next((b for b in self.bindings if b.port.name == port), None)


class Owner(msgspec.Struct):
    """One process: its thread count and the resource that it alone holds."""

    name: str
    place: Place
    threads: int | None = None
    engine: EngineOptions | None = None
    learner: LearnerOptions | None = None

    @property
    def model(self) -> str | None:
        resource = self.engine or self.learner
        return resource.model if resource else None


class Graph(msgspec.Struct):
    """The whole ring, resolved: names are hops, types are known, nothing has run."""

    file: GraphFile
    owners: dict[str, Owner]
    nodes: dict[str, Node]

    @property
    def dims(self) -> dict[str, Size]:
        return self.file.dims

    def readers(self, producer: str) -> list[tuple[Node, Binding]]:
        """Every (node, binding) that reads a value which `producer` writes."""
        return [(n, b) for n in self.nodes.values() for b in n.bindings if b.producer == producer]

    @property
    def max_lag(self) -> int | None:
        """The largest lag that a back edge tolerates; None without a back edge."""
        lags = [b.decl.max_lag for n in self.nodes.values() for b in n.bindings if b.decl.max_lag is not None]
        return max(lags, default=None)


def later(a: RowKind | None, b: RowKind | None) -> RowKind | None:
    """The kind that is derived from the other (or the one that is known)."""
    if a is None or b is None:
        return a or b
    return max(a, b, key=ROW_KINDS.index)
