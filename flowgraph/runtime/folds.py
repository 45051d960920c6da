"""The driver's folds: their states, what waits for each, and which one fires next.

Row queues go before events, and events before levels (`latest` values that changed), so a fold's ledger is up to date
before another fold reads it: a trajectory is in the buffer before dispatch counts it as finished. A queue is taken from
only while the fold says that it has room. One that makes groups or steps is told how many it may make, or else fires
only while it may make another.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import msgspec

from flowgraph.errors import FlowgraphError, HiddenState, HopError, PayloadError
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime import purity
from flowgraph.runtime.firing import said_of, with_row
from flowgraph.runtime.worker import fill
from flowgraph.spec.types import Dropped, Row


class Fold(msgspec.Struct, eq=False):
    """One fold: its bound function, the state that it alone may mutate, and what waits for it.

    full: whether its queues wait, None while it has not been asked since its last call
    queues: port → rows to take; handed: those of its queues that another fold fills
    gated: it fires on credit only; stuck: it had none when so often something had become free
    credit: the parameter that says how many steps it may make, if it has one
    ports: what it is called with: what came, or None; the newest value of each level; and its credit
    first: the port of rows whose columns it may read; shows: the output whose rows are shown there
    names: of its outputs; outputs: what becomes of each, and its full name; lists: those that are lists of rows
    read: key of a row that it is shown → its columns by port
    """

    hop: Hop
    step: Callable[..., Any]
    room: Callable[[Any], int] | None
    full: bool | None
    state: Any
    queues: dict[str, deque[Row]]
    handed: frozenset[str]
    gated: bool
    credit: str
    ports: dict[str, Any]
    shows: tuple[tuple[str, str], ...]
    first: str
    names: tuple[str, ...]
    outputs: tuple[tuple[str, tuple[str, str]], ...]
    lists: tuple[int, ...]
    events: deque[tuple[str, Any]]
    changed: bool = True
    stuck: int = -1
    read: dict[int, dict[str, Any]] = {}

    def is_full(self) -> bool:
        """Whether its queues wait. It is asked once after every call, which alone can change the answer."""
        if self.full is None:
            self.full = self.room is not None and self.room(self.state) <= 0
        return self.full


class Folds:
    """All folds of a plan, and the newest value of every output that is read as `latest`.

    told: hop → ports that hear of the rows which it gave; queued: hop → queues of the rows that it works on
    heard: output → ports that hear each of its values; levels: output → ports that hold its newest
    handed: output → queues that its rows go on into; passed: output → ports that hear of it
    """

    def __init__(self, plan: Plan, resources: Mapping[str, Any]) -> None:
        self.all = {
            name: _make(plan, hop, resources) for name, hop in plan.hops.items() if hop.kind == "fold"
        }
        self.latest: dict[tuple[str, str], Any] = {}
        self.verify = plan.verify
        self.told: dict[str, list[tuple[Fold, str]]] = {}
        self.queued: dict[str, list[deque[Row]]] = {}
        self.heard: dict[tuple[str, str], list[tuple[Fold, str]]] = {}
        self.levels: dict[tuple[str, str], list[tuple[Fold, str]]] = {}
        self.handed: dict[tuple[str, str], list[deque[Row]]] = {}
        self.passed: dict[tuple[str, str], list[tuple[Fold, str]]] = {}
        for fold in self.all.values():
            for w in fold.hop.watches:
                if w.mode == "latest":
                    self.levels.setdefault((w.producer, w.output), []).append((fold, w.port))
                elif w.mode == "event" and plan.hops[w.producer].outputs.get(w.output) == "handed":
                    self.passed.setdefault((w.producer, w.output), []).append((fold, w.port))
                elif w.mode == "event" and w.rows:
                    self.told.setdefault(w.producer, []).append((fold, w.port))
                elif w.mode == "event":
                    self.heard.setdefault((w.producer, w.output), []).append((fold, w.port))
                elif w.port in fold.handed:
                    self.handed.setdefault((w.producer, w.output), []).append(fold.queues[w.port])
                else:
                    self.queued.setdefault(w.producer, []).append(fold.queues[w.port])
        self._every = list(self.all.values())

    def next(self, credit: Callable[[Hop], int], freed: int) -> tuple[Fold, str, Any] | None:
        """The fold that fires next, the port that something came for ("": only levels changed), and what came.

        Whatever makes it fire, it sees the newest values of all its levels.
        freed: how often something became free; a fold that had no credit is not looked at before
        """
        hears = looks = None
        for fold in self._every:
            if fold.gated and (fold.stuck == freed or credit(fold.hop) <= 0):
                fold.stuck = freed
                continue
            for port, queue in fold.queues.items():
                if queue and not fold.is_full():
                    fold.changed = False
                    return fold, port, queue.popleft()
            if fold.events:
                hears = hears or fold
            elif fold.changed:
                looks = looks or fold
        found = hears or looks
        if found is None:
            return None
        found.changed = False
        return (found, *found.events.popleft()) if hears else (found, "", None)

    def shown(self, fold: Fold, port: str, value: Any) -> list[Row]:
        """The rows whose columns a fold may read: those that its first port of rows shows, or that just came there."""
        rows = [value] if port == fold.first else []
        for output in fold.shows:
            rows += self.latest.get(output, ())
        return rows

    def fire(
        self, fold: Fold, port: str, value: Any, columns: Mapping[str, Any], credit: int
    ) -> tuple[Any, ...]:
        """Call a fold once; its outputs in the order of `Fold.names`. credit: groups or steps that it may make

        Raises HopError when it raises, PayloadError for a wrong output, and in verify mode HiddenState.
        """
        ports = fold.ports
        if columns or self.verify:
            ports = {**ports, **columns}
        if port:
            ports[port] = value
        if fold.credit:
            ports[fold.credit] = credit
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
        if port:
            ports[port] = None
        fold.full = None
        if getattr(result, "_fields", None) != fold.names:
            result = _in_order(fold, result)
        values: tuple[Any, ...] = result
        for i in fold.lists:
            if not isinstance(values[i], (list, tuple)):
                _refuse(fold, f"gave {fold.names[i]} as {type(values[i]).__name__}, and its port is rows")
        return values

    def tell(self, hop: str, row: Row) -> None:
        """A hop gave a row its part, or will never: who watches its rows as events learns of it at once."""
        for fold, port in self.told.get(hop, ()):
            fold.events.append((port, row))

    def queue(self, hops: Collection[str], row: Row) -> int:
        """Every one of these hops, which are all that work on the row, is done: put it into each queue that takes it.

        What is taken from a queue can be trained, dropped and freed. Returns the queues that it is in now.
        """
        queued = 0
        for hop in hops:
            for queue in self.queued.get(hop, ()):
                queue.append(row)
                queued += 1
        return queued

    def publish(self, producer: str, output: str, value: Any) -> bool:
        """A value output has a value: keep it, and wake who watches it. False when it is the one it had."""
        key = producer, output
        if not isinstance(value, Dropped):
            if key in self.latest and self.latest[key] == value:
                return False
            self.latest[key] = value
        for fold, port in self.heard.get(key, ()):
            fold.events.append((port, value))
        for fold, port in self.levels.get(key, ()):
            fold.ports[port] = value
            fold.changed = True
        return True

    def hand(self, output: tuple[str, str], row: Row) -> None:
        """A fold hands a row on to those that follow it."""
        for queue in self.handed.get(output, ()):
            queue.append(row)
        for fold, port in self.passed.get(output, ()):
            fold.events.append((port, row))

    def waiting(self) -> dict[str, int]:
        """Rows queued for each fold that has any."""
        counts = {name: sum(map(len, fold.queues.values())) for name, fold in self.all.items()}
        return {name: n for name, n in counts.items() if n}


def _in_order(fold: Fold, result: Any) -> tuple[Any, ...]:
    """What a fold gave, output by output: a value without a name, or a tuple of names of its own."""
    values = result._asdict() if hasattr(result, "_asdict") else {"out": result}
    for name in fold.names:
        if name not in values:
            _refuse(fold, f"gave no {name}")
    return tuple(values[name] for name in fold.names)


def _refuse(fold: Fold, what: str) -> NoReturn:
    raise PayloadError(f"fold {fold.hop.name} {what}", f"return what {fold.hop.place} is annotated to return")


def _bound(function: Any, fixed: Mapping[str, Any], verify: bool) -> Callable[..., Any]:
    """A fold's function with its options: its own defaults, where nobody looks at them, which makes calls cheaper."""
    if verify or not isinstance(function, types.FunctionType):
        return functools.partial(function, **fixed)
    own = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **fixed}
    return own


def _make(plan: Plan, hop: Hop, resources: Mapping[str, Any]) -> Fold:
    spec, fixed = fill(hop, resources)
    room = functools.partial(spec.facts.room, **fixed) if spec.facts.room is not None else None
    state = spec.state()
    queues: dict[str, deque[Row]] = {w.port: deque() for w in hop.watches if w.mode == "queue"}
    rows = [w for w in hop.watches if w.rows]
    credit = next((p.name for p in spec.params if p.origin == "credit"), "")
    return Fold(
        hop,
        _bound(spec.function, fixed, plan.verify),
        room,
        None,
        state,
        queues,
        handed=frozenset(
            w.port for w in hop.watches if plan.hops[w.producer].outputs.get(w.output) == "handed"
        ),
        gated=hop.makes_rows and hop.rows != "trajectory" and not credit,
        credit=credit,
        ports={w.port: None if w.mode != "latest" else () if w.rows else 0 for w in hop.watches},
        shows=tuple((w.producer, w.output) for w in rows[:1] if w.mode == "latest"),
        first=rows[0].port if rows else "",
        names=tuple(hop.outputs),
        outputs=tuple((kind, (hop.name, name)) for name, kind in hop.outputs.items()),
        lists=tuple(i for i, kind in enumerate(hop.outputs.values()) if kind in ("rows", "latest", "handed")),
        events=deque(),
    )
