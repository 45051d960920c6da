"""What crosses each seam, in bytes a step: the edges of the plan, priced from shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from flowgraph.engines.registry import SglangOptions, push, servers
from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.ranks import processes, share
from flowgraph.passes.sizes import WHICH, rows_per_step
from flowgraph.plan.parts import readings
from flowgraph.plan.plan import Hop, Pushed, Read, Seam, SeamField
from flowgraph.plan.taken import takes
from flowgraph.spec.types import LIFETIMES, Transport


class Bytes(NamedTuple):
    """Mean and bound, of one row or of one step."""

    mean: float
    max: float


def _rows(graph: Graph, hop: Hop, one: Read, hops: Mapping[str, Hop]) -> Bytes:
    """How many rows' values a hop reads in a step.

    A group's value is read once a trajectory, by reference to one copy; or once a group, and at most as often as
    there are trajectories, should a batch take one of each group.
    """
    writer = hops[one.producer].rows
    finest = hop.rows if writer == hop.rows else "trajectory"
    mean = rows_per_step(writer if one.once else finest, graph.dims, "mean")
    return Bytes(mean / hop.every, rows_per_step(finest, graph.dims, "max"))


def seams(graph: Graph, hops: Mapping[str, Hop]) -> Iterator[Seam]:
    """One seam for every (hop, reader) that the graph writes, in file order of the readers."""
    relayed: set[tuple[str, str]] = set()
    for node in graph.nodes.values():
        taken = takes(hops[node.name].reads)
        for source in dict.fromkeys(b.via for b in node.bindings):
            bindings = [b for b in node.bindings if b.via == source]
            fields = tuple(
                _field(graph, b, hops, hops[node.name], taken[b.port.name], relayed)
                for b in bindings
                if b.is_column
            )
            control = tuple(b.port.name for b in bindings if not b.is_column)
            lives = [hops[f.producer].lifetime for f in fields] or [hops[source].lifetime]
            yield Seam(
                source=source,
                reader=node.name,
                transport=_transport(hops, hops[node.name], bindings),
                lifetime=max(lives, key=LIFETIMES.index),
                fields=fields,
                control=control,
                delay=max(b.decl.delay for b in bindings),
                max_lag=next((b.decl.max_lag for b in bindings if b.decl.max_lag is not None), None),
                every=max(b.decl.every for b in bindings),
                pushed=_pushed(graph, node, bindings, fields),
            )


def _pushed(
    graph: Graph, node: Node, bindings: list[Binding], fields: tuple[SeamField, ...]
) -> Pushed | None:
    """Weights go on into every server of the engine. Of a delta only the bound is known before it is made."""
    engine = graph.owners[node.owner].engine if node.spec.facts.uses == "engine" else None
    weights = {b.port.name for b in bindings if b.port.kind == "tensors"}
    by = push(engine) if engine and weights else None
    if engine is None or by is None:
        return None
    read, count = [f for f in fields if f.port in weights], servers(engine)
    # Every rank gets a broadcast whole, and keeps its slice.
    copies = count * (engine.tp if by == "distributed" and isinstance(engine, SglangOptions) else 1)
    return Pushed(
        by, count, copies * sum(f.mean_bytes for f in read), copies * sum(f.max_bytes for f in read)
    )


def _transport(hops: Mapping[str, Hop], hop: Hop, bindings: list[Binding]) -> Transport:
    """The longest way that any byte of a seam takes."""
    ports = {b.port.name for b in bindings if b.is_column}
    reads = [r for r in hop.reads if r.port in ports]
    if not reads:
        return "control"
    if all(r.handed for r in reads):
        return "fused"
    makers = {p for r in reads for p in r.producers()}
    if any(hops[p].home != hops[p].owner for p in makers):
        return "through the driver"
    return "shared memory" if any(hops[p].home != hop.owner for p in makers) else "in process"


def _field(
    graph: Graph,
    binding: Binding,
    hops: Mapping[str, Hop],
    hop: Hop,
    taken: list[Read],
    relayed: set[tuple[str, str]],
) -> SeamField:
    assert binding.source is not None
    own = hops[binding.producer].column(binding.source.name)
    total, through = [], []
    several = processes(graph, hop.owner) if hop.uses == "learner" else 1
    for one in taken:
        producer = hops[one.producer]
        column, rows = producer.column(one.column), _rows(graph, hop, one, hops)
        again = readings(several, producer, column.name)
        crossing = Bytes(again * column.mean_bytes * rows.mean, again * column.max_bytes * rows.max)
        total.append(crossing)
        if producer.home != producer.owner and (producer.name, column.name) not in relayed:
            relayed.add((producer.name, column.name))
            through.append(_relayed(graph, producer, column.mean_bytes, column.max_bytes))
        if (producer.home == "driver") != (hop.owner == "driver"):
            through.append(crossing)
    mean, bound = _sum(total)
    driver_mean, driver_bound = _sum(through)
    ranks, split = share(graph, graph.nodes[hop.name], binding.source, graph.nodes[binding.producer])
    return SeamField(
        port=binding.port.name,
        producer=binding.producer,
        column=own.name,
        type=str(msgspec.structs.replace(binding.port, dtype=binding.source.dtype)),
        facts=own.facts,
        mean_bytes=mean,
        max_bytes=int(bound),
        priced=own.kind != "tensors" or bool(own.tensors),
        driver=(driver_mean, int(driver_bound)),
        ranks=ranks,
        slice_bytes=mean / (math.prod(n for _, n in split) if split else several),
        split=split,
    )


def _sum(parts: list[Bytes]) -> Bytes:
    return Bytes(sum(p.mean for p in parts), sum(p.max for p in parts))


def _relayed(graph: Graph, producer: Hop, mean: float, bound: float) -> Bytes:
    """Bytes a step on their way into the driver's memory, from those of a row."""
    rows = Bytes(*(rows_per_step(producer.rows, graph.dims, which) for which in WHICH))
    return Bytes(mean * rows.mean / producer.every, bound * rows.max)


def unread(graph: Graph, hops: Mapping[str, Hop]) -> dict[str, tuple[float, int]]:
    """Hop → bytes a step that pass into the driver though nobody reads them."""
    taken = {(one.producer, one.column) for h in hops.values() for t in takes(h.reads).values() for one in t}
    out = {}
    for name, hop in hops.items():
        columns = [c for c in hop.written if (name, c.name) not in taken]
        if hop.home != hop.owner and columns:
            mean, bound = sum(c.mean_bytes for c in columns), sum(c.max_bytes for c in columns)
            through = _relayed(graph, hop, mean, bound)
            out[name] = through.mean, int(through.max)
    return out
