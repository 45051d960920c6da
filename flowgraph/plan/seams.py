"""What crosses each seam, in bytes a step: the edges of the plan, priced from shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.sizes import rows_per_step
from flowgraph.plan.plan import Hop, Read, Seam, SeamField, Transport
from flowgraph.spec.types import LIFETIMES


class Bytes(NamedTuple):
    """Mean and bound, of one row or of one step."""

    mean: float
    max: float


def priced(graph: Graph, hops: Mapping[str, Hop]) -> dict[str, Hop]:
    """The hops, with what each read takes besides its own column."""
    out = {}
    for name, hop in hops.items():
        reads = tuple(
            _with_extra(graph, hops, hop, one, [t for t in taken if t is not one])
            for one, taken in zip(hop.reads, takes(hop), strict=True)
        )
        out[name] = msgspec.structs.replace(hop, reads=reads)
    return out


def _with_extra(graph: Graph, hops: Mapping[str, Hop], hop: Hop, one: Read, besides: list[Read]) -> Read:
    mean = bound = 0.0
    for need in besides:
        column = hops[need.producer].column(need.column)
        rows = _rows(graph, hop, need, hops)
        mean, bound = mean + column.mean_bytes * rows.mean, bound + column.max_bytes * rows.max
    return msgspec.structs.replace(one, extra_bytes=(mean, bound)) if mean or bound else one


def takes(hop: Hop) -> list[list[Read]]:
    """For each read of a hop, in order, the columns whose bytes are its own to count: that which the port is bound to,
    where it crosses, and what its form takes that no port reads by itself and no earlier one took.
    """
    claimed = {(r.producer, r.column) for r in hop.reads if r.crosses}
    out = []
    for one in hop.reads:
        mine = [one] if one.crosses else []
        for need in _needs(one):
            key = need.producer, need.column
            if key not in claimed and need.crosses:
                claimed.add(key)
                mine.append(need)
        out.append(mine)
    return out


def _needs(one: Read) -> Iterator[Read]:
    for need in one.needs:
        yield need
        yield from _needs(need)


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
        for source in dict.fromkeys(b.via for b in node.bindings):
            bindings = [b for b in node.bindings if b.via == source]
            fields = tuple(_field(graph, node, b, hops, relayed) for b in bindings if b.is_column)
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
    graph: Graph, node: Node, binding: Binding, hops: Mapping[str, Hop], relayed: set[tuple[str, str]]
) -> SeamField:
    assert binding.source is not None
    hop, producer = hops[node.name], hops[binding.producer]
    column = producer.column(binding.source.name)
    one = next(r for r in hop.reads if r.port == binding.port.name)
    mean, bound = one.extra_bytes
    through = 0.0
    if one.crosses:
        rows = _rows(graph, hop, one, hops)
        mean, bound = mean + column.mean_bytes * rows.mean, bound + column.max_bytes * rows.max
        key = producer.name, column.name
        if producer.home != producer.owner and key not in relayed:
            relayed.add(key)
            through += relay_bytes(graph, producer, column.mean_bytes)
    if any((hops[p].home == "driver") != (hop.owner == "driver") for p in one.producers()):
        through += mean
    return SeamField(
        port=binding.port.name,
        producer=binding.producer,
        column=column.name,
        type=str(binding.port),
        facts=column.facts,
        mean_bytes=mean,
        max_bytes=int(bound),
        priced=column.kind != "tensors" or bool(column.tensors),
        driver_bytes=through,
    )


def relay_bytes(graph: Graph, producer: Hop, row: float) -> float:
    """Mean bytes a step of a column on their way into the driver's memory."""
    return row * rows_per_step(producer.rows, graph.dims, "mean") / producer.every


def unread(graph: Graph, hops: Mapping[str, Hop]) -> dict[str, float]:
    """Hop → mean bytes a step that pass into the driver though nobody reads them."""
    out = {}
    for name, hop in hops.items():
        rows = sum(c.mean_bytes for c in hop.written if not c.read)
        if hop.home != hop.owner and rows:
            out[name] = relay_bytes(graph, hop, rows)
    return out
