"""How stale a row can be when it is trained: the bound of the ring, and FG402, which compares it with `max_lag`.

For trajectories that are consumed in the order of dispatch, lag = batch_id − tag is at most

    ceil(n/b) − 1 + q + o + (k − 1)

n trajectories are in flight or ready, so a new one waits for ceil(n/b) − 1 batches before its own; q batches of b wait
to be trained; o = 1 is being trained while rollout goes on; and k − 1 are trained but in no version yet, when every
k-th is synced. A dispatcher that admits no more than a trajectories beyond those that the version accounts for is a
gate: what it tags is in one of the next ceil(a/b) batches, so the lag is at most ceil(a/b) − 1 whatever the queues
hold. The smaller of both is the bound. What overtakes is caught by the hard test when a batch is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.fixed import ask
from flowgraph.passes.order import every, thinned
from flowgraph.passes.sizes import rows_per_step


class Staleness(msgspec.Struct, frozen=True):
    """The bound of one collecting hop, and what it is made of. n is None when nothing bounds it but the gate.

    n, admitted, b: rows of the kind that is collected, trajectories; q: steps; o: 0 or 1
    sync: batches between two versions, less one
    """

    batch: str
    n: int | None
    b: int
    q: int
    o: int
    sync: int = 0
    admitted: int | None = None

    @property
    def formula(self) -> int | None:
        return None if self.n is None else -(-self.n // self.b) - 1 + self.q + self.o + self.sync

    @property
    def gate(self) -> int | None:
        return None if self.admitted is None else max(0, -(-self.admitted // self.b) - 1)

    @property
    def bound(self) -> int:
        return min(bound for bound in (self.formula, self.gate) if bound is not None)

    @property
    def parts(self) -> str:
        """What the bound is made of: what each queue adds, and what the dispatcher admits whatever they hold."""
        out = []
        if self.formula is not None:
            assert self.n is not None
            flight = -(-self.n // self.b) - 1
            named = (
                (flight, "in flight and ready"),
                (self.q, "queued"),
                (self.o, "in training"),
                (self.sync, "unsynced"),
            )
            out.append(" + ".join(f"{n} {what}" for n, what in named if n) or "nothing waits")
        if self.gate is not None:
            out.append(f"dispatch admits {self.gate}")
        return "; ".join(out)


def staleness(graph: Graph) -> Staleness | None:
    """The largest bound of all collecting hops; None without a back edge, or when nothing bounds what is in flight."""
    found = [s for node in _collecting(graph) if (s := _bound(graph, node)) is not None]
    return max(found, key=lambda s: s.bound, default=None)


def queue_depth(graph: Graph, node: Node) -> int:
    """Batches that may wait to be trained: what the file says, else one, where `max_lag` leaves room for it.

    A batch that waits is one version older when it is trained, and one is enough to keep training fed.
    """
    if node.capacity is not None:
        return node.capacity
    lag = graph.max_lag or 0
    least = _bound(graph, node, q=0)
    if least is None or least.formula is None or (least.gate is not None and least.gate <= lag):
        return min(1, lag)  # the gate alone proves the bound, whatever the queue
    return min(1, max(0, lag - least.formula))


def _collecting(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes.values() if n.spec.facts.collect] if graph.max_lag is not None else []


def _bound(graph: Graph, batch: Node, q: int | None = None) -> Staleness | None:
    lag, makers = graph.max_lag, makers_of(graph, batch)
    if lag is None or len(makers) != 1 or graph.doubtful(batch):
        return None
    (maker,) = makers
    pools = pools_of(graph, batch)
    rooms = [room(graph, pool) for pool in pools]
    flight = _held(graph, maker, maker.config)
    out = admitted(graph, maker)
    if out is None and maker.spec.facts.admits is not None:
        return None  # a wrong option, which has its own finding
    # A dispatcher that looks at the room of a pool counts what is in flight against it.
    looks = any(b.port.kind == "value" and b.producer == pool.name for b in maker.bindings for pool in pools)
    parts = rooms if looks else [*rooms, flight]
    n = sum(p for p in parts if p is not None) if pools and None not in parts else out
    if n is None:
        return None
    depth = queue_depth(graph, batch) if q is None else q
    b = batch_size(graph, batch)
    return Staleness(batch.name, n, b, depth, int(lag > 0), _between(graph) - 1, out)


def makers_of(graph: Graph, batch: Node) -> list[Node]:
    """The hops that make the rows which a batch collects."""
    return [n for n in graph.upstream(batch) if n.spec.facts.expand and n.kind == _taken(batch)]


def pools_of(graph: Graph, batch: Node) -> list[Node]:
    """The folds that keep rows until a batch takes them."""
    before = [n for n in graph.upstream(batch) if n.kind == _taken(batch)]
    return [n for n in before if n.spec.facts.room and not n.spec.facts.expand]


def admitted(graph: Graph, maker: Node) -> int | None:
    """The rows of a dispatcher that may be out in all; None when it declares no such gate."""
    return ask(graph, maker, maker.spec.facts.admits, config=maker.config)


def batch_size(graph: Graph, batch: Node) -> int:
    """Rows that one step takes."""
    return int(rows_per_step(_taken(batch), graph.dims))


def _taken(batch: Node) -> str | None:
    return batch.spec.facts.collect[0] if batch.spec.facts.collect else None


def room(graph: Graph, node: Node) -> int | None:
    """The rows that a pool takes before anything has come, or that a dispatcher lets be in flight."""
    return _held(graph, node, node.config)


def _between(graph: Graph) -> int:
    """Batches from one version to the next: what sync skips, and what a hop before it does."""
    if graph.broken:
        return 1
    fires = every(graph)
    return max((fires[node.name] for node in _publishers(graph)), default=1)


def _publishers(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes.values() if any(p.initial is not None for p in n.spec.outputs)]


# --- FG402 -----------------------------------------------------------------------------------------------------


def check_staleness(graph: Graph) -> Iterator[Diagnostic]:
    """FG402: the bound stays within `max_lag`; so does each capacity that is given, were the others at their least."""
    lag = graph.max_lag
    if lag is None:
        return
    alone = [d for batch in _collecting(graph) for d in _alone(graph, batch, lag)]
    yield from alone
    yield from _syncs(graph, lag)
    found = staleness(graph)
    if found is not None and found.bound > lag and not alone:
        yield _over(graph, found, lag)


def _alone(graph: Graph, batch: Node, lag: int) -> Iterator[Diagnostic]:
    queue, decl, b = batch.capacity, graph.file.hops[batch.name], batch_size(graph, batch)
    if queue is not None and queue > lag:
        message = (
            f"a train queue of {queue} behind {batch.name} alone makes rows {_stale(queue)}; max_lag is {lag}"
        )
        help = f"set capacity: {lag}, or raise max_lag to {queue}"
        yield Diagnostic("FG402", decl.capacity_place or decl.place, message, help)
    for node in (*makers_of(graph, batch), *pools_of(graph, batch)):
        size, option = _held(graph, node, node.config), deciding(graph, node)
        if size is not None and option and (stale := -(-size // b) - 1) > lag:
            holds = (
                f"{node.name} may have {size} rows in flight"
                if node.spec.facts.expand
                else f"{node.name} holds {size} rows"
            )
            message = f"{holds}, in batches of {b}, which alone makes them {_stale(stale)}; max_lag is {lag}"
            help = f"set {option} for at most {(lag + 1) * b} rows, or raise max_lag to {stale}"
            yield Diagnostic("FG402", graph.option_place(node, option), message, help)


def _stale(versions: int) -> str:
    return f"{versions} version{'' if versions == 1 else 's'} stale"


def _held(graph: Graph, node: Node, config: Mapping[str, Any]) -> int | None:
    """Rows that a hop may have at once: in flight for a dispatcher, waiting for a pool."""
    facts = node.spec.facts
    if facts.expand:
        return ask(graph, node, facts.flight, config=config)
    if facts.room is None:
        return None
    return ask(graph, node, facts.room, node.spec.state(), config=config)


def deciding(graph: Graph, node: Node) -> str:
    """The option under `with:` that decides how many rows a hop may have; "" when it is the hop's own default."""
    size = _held(graph, node, node.config)
    rest = {name: {k: v for k, v in node.config.items() if k != name} for name in node.config}
    return next((name for name, config in rest.items() if _held(graph, node, config) != size), "")


def _syncs(graph: Graph, lag: int) -> Iterator[Diagnostic]:
    """Every k-th sync can be reached with what `max_lag` admits."""
    between = _between(graph)
    for node in _publishers(graph) if between - 1 > lag else ():
        slow = thinned(graph, node)
        assert slow is not None
        what = f"{node.name} publishes every {between} steps, but max_lag is {lag}"
        message = f"{what}: step {lag + 1} would wait for ever"
        help = f"set max_lag: {between - 1}, or every: {lag + 1}"
        yield Diagnostic("FG402", slow.decl.place, message, help)


def _over(graph: Graph, s: Staleness, lag: int) -> Diagnostic:
    """The bound as a whole is too large: the queue that could be small enough to mend it, and that size."""
    batch = graph.nodes[s.batch]
    decl = graph.file.hops[s.batch]
    parts = [f"ceil({s.n}/{s.b}) − 1 in flight and ready", f"{s.q} queued for training", f"{s.o} in training"]
    if s.sync:
        parts.append(f"{s.sync} not yet synced")
    message = f"rows may become {_stale(s.bound)} ({' + '.join(parts)}), but max_lag is {lag}"
    queue = lag - (s.bound - s.q)
    rows = (lag + 1 - s.q - s.o - s.sync) * s.b
    pools = pools_of(graph, batch)
    if batch.capacity is not None and queue >= 0:
        place, help = decl.capacity_place or decl.place, f"set capacity: {queue} for {batch.name}"
    elif pools and rows >= s.b:
        place = graph.option_place(pools[0], deciding(graph, pools[0]))
        help = f"give {pools[0].name} room for at most {rows} rows"
    else:
        place, help = (
            batch.place,
            "use a dispatcher that declares what it admits, as hops.dispatch.watermark does",
        )
    return Diagnostic("FG402", place, message, f"{help}, or raise max_lag to {s.bound}")
