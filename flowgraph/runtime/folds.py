"""The driver's folds: their states, what waits for each, and which one fires next.

Row queues go before events, and events before levels (`latest` values that changed), so a fold's ledger is up to date
before another fold reads it: a trajectory is in the buffer before dispatch counts it as finished. A queue is taken from
only while the fold says that it has room.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from flowgraph.errors import FlowgraphError, HiddenState, HopError, PayloadError
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime import purity
from flowgraph.runtime.firing import said_of, with_row
from flowgraph.runtime.worker import fill
from flowgraph.spec.types import Dropped, Row


class Fold(msgspec.Struct):
    """One fold: its bound function, the state that it alone may mutate, and what waits for it.

    read: key of a row that it is shown → its columns by port
    """

    hop: Hop
    step: Callable[..., Any]
    room: Callable[[Any], int]
    state: Any
    events: deque[tuple[str, Any]]
    queues: dict[str, deque[Row]]
    changed: bool = True
    read: dict[int, dict[str, Any]] = {}


class Folds:
    """All folds of a plan, and the newest value of every output that is read as `latest`."""

    def __init__(self, plan: Plan, resources: Mapping[str, Any]) -> None:
        self.all = {name: _make(hop, resources) for name, hop in plan.hops.items() if hop.kind == "fold"}
        self.latest: dict[tuple[str, str], Any] = {}
        self.verify = plan.verify

    def next(self, has_credit: Callable[[Hop], bool]) -> tuple[Fold, str, Any] | None:
        """The fold that fires next, the port that something came for ("": only levels changed), and what came."""
        for fold in self.all.values():
            for port, queue in fold.queues.items():
                if queue and fold.room(fold.state) > 0:
                    return fold, port, queue.popleft()
        for fold in self.all.values():
            if fold.events:
                return fold, *fold.events.popleft()
        for fold in self.all.values():
            if fold.changed and has_credit(fold.hop):
                fold.changed = False
                return fold, "", None
        return None

    def shown(self, fold: Fold, value: Any) -> list[Row]:
        """The rows whose columns a fold may read: those that its first port of rows is of, shown or just come."""
        watched = [w for w in fold.hop.watches if w.rows]
        rows = [value] if isinstance(value, Row) else []
        for watch in watched:
            if watch.mode == "latest":
                rows += self.latest.get((watch.producer, watch.output), ())
        return [row for row in rows if row.kind == watched[0].rows]

    def fire(self, fold: Fold, port: str, value: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Call a fold once; its outputs by name.

        Raises HopError when it raises, PayloadError for a wrong output, and in verify mode HiddenState.
        """
        ports: dict[str, Any] = dict(columns)
        for watch in fold.hop.watches:
            empty: Any = () if watch.rows else 0
            newest = self.latest.get((watch.producer, watch.output), empty)
            ports[watch.port] = newest if watch.mode == "latest" else value if watch.port == port else None
        try:
            if self.verify:
                who = f"fold {fold.hop.name}"
                result = purity.step(who, fold.step, fold.state, ports, fold.hop.resources)
            else:
                result = fold.step(fold.state, **ports)
        except HiddenState as error:
            raise with_row(error, said_of(value) if isinstance(value, Row) else "") from error
        except FlowgraphError:
            raise
        except Exception as error:
            text = f"fold {fold.hop.name}: {type(error).__name__}: {error}"
            raise HopError(text, f"see {fold.hop.place}") from error
        values = result._asdict() if hasattr(result, "_asdict") else {"out": result}
        return {name: _output(fold.hop, name, values) for name in fold.hop.outputs}

    def offer(self, producer: str, row: Row, through: Collection[str]) -> int:
        """A hop gave a row its part: put the row where folds find it. Returns the queues that it is in now.

        through: when every hop is done with the row, those hops, else none. Who watches a hop's rows as events learns
        of them at once; a queue gets the row complete, so that what is taken from it can be trained, dropped and freed.
        """
        queued = 0
        for fold in self.all.values():
            for watch in fold.hop.watches:
                if watch.rows != row.kind:
                    continue
                if watch.mode == "event" and watch.producer == producer:
                    fold.events.append((watch.port, row))
                elif watch.mode == "queue" and watch.producer in through:
                    fold.queues[watch.port].append(row)
                    queued += 1
        return queued

    def publish(self, producer: str, output: str, value: Any) -> bool:
        """A value output has a value: keep it, and wake who watches it. False when it is the one it had."""
        if not isinstance(value, Dropped):
            if (producer, output) in self.latest and self.latest[producer, output] == value:
                return False
            self.latest[producer, output] = value
        for fold in self.all.values():
            for watch in fold.hop.watches:
                if (watch.producer, watch.output) == (producer, output):
                    if watch.mode == "event":
                        fold.events.append((watch.port, value))
                    else:
                        fold.changed = True
        return True

    def wake_all(self) -> None:
        """Something happened that gives credit; every fold may look."""
        for fold in self.all.values():
            fold.changed = True

    def waiting(self) -> dict[str, int]:
        """Rows queued for each fold that has any."""
        counts = {name: sum(map(len, fold.queues.values())) for name, fold in self.all.items()}
        return {name: n for name, n in counts.items() if n}


def _output(hop: Hop, name: str, values: Mapping[str, Any]) -> Any:
    """One output of a fold: there, and a list where rows are promised."""
    value = values.get(name)
    if name not in values or (
        hop.outputs[name] in ("rows", "latest") and not isinstance(value, list | tuple)
    ):
        what = (
            f"gave {name} as {type(value).__name__}, and its port is rows"
            if name in values
            else f"gave no {name}"
        )
        raise PayloadError(f"fold {hop.name} {what}", f"return what {hop.place} is annotated to return")
    return value


def _make(hop: Hop, resources: Mapping[str, Any]) -> Fold:
    spec, fixed = fill(hop, resources)

    def room(state: Any) -> int:
        return spec.facts.room(state, **fixed) if spec.facts.room is not None else 1

    queues: dict[str, deque[Row]] = {w.port: deque() for w in hop.watches if w.mode == "queue"}
    return Fold(hop, functools.partial(spec.function, **fixed), room, spec.state(), deque(), queues)
