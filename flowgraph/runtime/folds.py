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
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from flowgraph.errors import FlowgraphError, HiddenState, HopError, PayloadError
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime import purity
from flowgraph.runtime.firing import said_of, with_row
from flowgraph.runtime.rows import Record
from flowgraph.runtime.worker import fill
from flowgraph.spec.types import Dropped, Row

Listener = tuple["deque[tuple[str, Any]]", str]  # what waits for a fold, and the port at which this comes


class Fold(msgspec.Struct, eq=False):
    """One fold: its bound function, the state that it alone may mutate, and what waits for it.

    full: whether its rows wait, None while it has not been asked since its last call
    rows: that wait for it, and at which port; events: what it is to hear of
    taken: ports at which it takes rows that every hop is done with, which wait there with their records
    gated: it fires on credit only; stuck: it had none when so often something had become free
    credit: the parameter that says how many steps it may make, if it has one
    ports: what it is called with: what came, or None; the newest value of each level; and its credit
    first: the port of rows whose columns it may read; shows: the output whose rows are shown there
    names: of its outputs; outputs: what becomes of each, and its full name; last: values that were published already
    gives: the type of what it returned last; read: key of a row that it is shown → its columns by port
    """

    hop: Hop
    step: Callable[..., Any]
    room: Callable[[Any], int] | None
    full: bool | None
    state: Any
    taken: frozenset[str]
    gated: bool
    credit: str
    ports: dict[str, Any]
    shows: tuple[tuple[str, str], ...]
    first: str
    names: tuple[str, ...]
    outputs: tuple[tuple[str, tuple[str, str]], ...]
    last: list[Any]
    rows: deque[tuple[str, Row | Record]]
    events: deque[tuple[str, Any]]
    changed: bool = True
    stuck: int = -1
    gives: type | None = None
    read: dict[int, dict[str, Any]] = {}

    def is_full(self) -> bool:
        """Whether its rows wait. It is asked once after every call, which alone can change the answer."""
        if self.full is None:
            assert self.room is not None, "else it is never full"
            self.full = self.room(self.state) <= 0
        return self.full


class Folds:
    """All folds of a plan, and the newest value of every output that is read as `latest`.

    told: hop → who hears of the rows that it gave; queued: fold that makes rows → who takes them when they are whole
    heard: output → who hears each of its values; levels: output → ports that hold its newest
    handed: output → who takes its rows, or hears of them
    """

    def __init__(self, plan: Plan, resources: Mapping[str, Any]) -> None:
        self.all = {
            name: _make(plan, hop, resources) for name, hop in plan.hops.items() if hop.kind == "fold"
        }
        self.latest: dict[tuple[str, str], Any] = {}
        self.verify = plan.verify
        self.told: dict[str, list[Listener]] = {name: [] for name in plan.hops}
        self.heard: dict[tuple[str, str], list[Listener]] = {}
        self.levels: dict[tuple[str, str], list[tuple[Fold, str]]] = {}
        self.handed: dict[tuple[str, str], list[Listener]] = {}
        queued: dict[str, list[Listener]] = {}
        for fold in self.all.values():
            for w in fold.hop.watches:
                output = w.producer, w.output
                if w.mode == "latest":
                    self.levels.setdefault(output, []).append((fold, w.port))
                elif plan.hops[w.producer].outputs.get(w.output) == "handed":
                    into: deque[Any] = fold.rows if w.mode == "queue" else fold.events
                    self.handed.setdefault(output, []).append((into, w.port))
                elif w.mode == "queue":
                    queued.setdefault(w.producer, []).append((fold.rows, w.port))
                elif w.rows:
                    self.told[w.producer].append((fold.events, w.port))
                else:
                    self.heard.setdefault(output, []).append((fold.events, w.port))
        makers = (name for name, hop in plan.hops.items() if hop.makes_rows)
        self.queued = {m: [one for hop in plan.workers(m) for one in queued.get(hop, ())] for m in makers}
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
            if fold.rows and (fold.full is False or not fold.is_full()):
                fold.changed = False
                port, row = fold.rows.popleft()
                return fold, port, row
            if fold.events:
                if hears is None:
                    hears = fold
            elif fold.changed and looks is None:
                looks = fold
        if hears is not None:
            hears.changed = False
            port, value = hears.events.popleft()
            return hears, port, value
        if looks is not None:
            looks.changed = False
            return looks, "", None
        return None

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
        fold.full = None if fold.room is not None else False
        if type(result) is not fold.gives:
            if getattr(result, "_fields", None) != fold.names:
                return _in_order(fold, result)
            fold.gives = type(result)
        values: tuple[Any, ...] = result
        return values

    def queue(self, record: Record) -> int:
        """Every hop that works on this row is done: queue it for each fold that takes it.

        What is taken from a queue can be trained, dropped and freed. Returns the queues that it is in now.
        """
        queues = self.queued[record.maker]
        for rows, port in queues:
            rows.append((port, record))
        return len(queues)

    def publish(self, key: tuple[str, str], value: Any) -> bool:
        """An output of values has one: keep it, and wake who watches it. False when it is the one it had."""
        if not isinstance(value, Dropped):
            if key in self.latest and self.latest[key] == value:
                return False
            self.latest[key] = value
        for events, port in self.heard.get(key, ()):
            events.append((port, value))
        for fold, port in self.levels.get(key, ()):
            fold.ports[port] = value
            fold.changed = True
        return True

    def hand(self, output: tuple[str, str], row: Row) -> None:
        """A fold hands a row on to those that follow it."""
        for queue, port in self.handed.get(output, ()):
            queue.append((port, row))

    def waiting(self) -> dict[str, int]:
        """Rows queued for each fold that has any."""
        return {name: len(fold.rows) for name, fold in self.all.items() if fold.rows}


def listed(fold: Fold, output: str, value: Any) -> list[Any] | tuple[Any, ...]:
    """What a fold gave for an output of rows. Raises PayloadError when that is no list."""
    if not isinstance(value, list | tuple):
        _refuse(fold, f"gave {output} as {type(value).__name__}, and its port is rows")
    return value


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
    code = function.__code__
    if not fixed.keys().isdisjoint(code.co_varnames[: code.co_argcount]):  # it can be given by position too
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
    room = _bound(spec.facts.room, fixed, plan.verify) if spec.facts.room is not None else None
    state = spec.state()
    rows = [w for w in hop.watches if w.rows]
    credit = next((p.name for p in spec.params if p.origin == "credit"), "")
    return Fold(
        hop,
        _bound(spec.function, fixed, plan.verify),
        room,
        None if room is not None else False,
        state,
        taken=frozenset(
            w.port
            for w in hop.watches
            if w.mode == "queue" and plan.hops[w.producer].outputs.get(w.output) != "handed"
        ),
        gated=hop.makes_rows and hop.rows != "trajectory" and not credit,
        credit=credit,
        ports={w.port: None if w.mode != "latest" else () if w.rows else 0 for w in hop.watches},
        shows=tuple((w.producer, w.output) for w in rows[:1] if w.mode == "latest"),
        first=rows[0].port if rows else "",
        names=tuple(hop.outputs),
        outputs=tuple((kind, (hop.name, name)) for name, kind in hop.outputs.items()),
        # An empty list of rows is nothing new; values are taken up as they are published.
        last=[[] if kind in ("rows", "handed") else None for kind in hop.outputs.values()],
        rows=deque(),
        events=deque(),
    )
