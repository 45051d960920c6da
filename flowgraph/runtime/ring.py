"""The driver: it fires folds and sends firings to workers, and holds nothing but ledgers and descriptors.

One turn is: take the messages that have come, then fire folds until none has anything to do, then send every
firing whose rows are complete. Events go before row queues, queues before levels (`latest` values that
changed), so a fold's ledger is up to date before another fold reads it: within a turn nothing is stale.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import Any, Protocol

import msgspec

from flowgraph.errors import DeadlineError, FlowgraphError, HopError, PayloadError, RunError
from flowgraph.plan.plan import Hop, Plan, Watch
from flowgraph.runtime import codec
from flowgraph.runtime.arena import map_all, regions
from flowgraph.runtime.executors import Executor, worker_owners
from flowgraph.runtime.ledger import Ledger
from flowgraph.runtime.messages import Done, Failed, Fire, FromWorker, Save, Saved
from flowgraph.runtime.rows import Record, Table
from flowgraph.runtime.worker import Worker, fill
from flowgraph.spec.types import Dropped, Row

ERRORS: dict[str, type[RunError]] = {e.code: e for e in (PayloadError, HopError)}


class Observer(Protocol):
    """Who is told what happened: metrics.jsonl, the live view, a test."""

    def step(self, record: dict[str, Any]) -> None: ...

    def event(self, record: dict[str, Any]) -> None: ...


class Firing(msgspec.Struct):
    """One firing in flight. holds: the event values that it keeps from being overwritten."""

    hop: str
    record: Record | None
    lease: int
    began: float
    holds: tuple[tuple[str, str], ...] = ()


class FoldState(msgspec.Struct):
    """One fold: its state, bound call, and what waits for it."""

    hop: Hop
    call: Any
    room: Any
    state: Any
    events: deque[tuple[str, Any]]
    queues: dict[str, deque[Row]]
    changed: bool = False


class Ring:
    """Runs one plan on one executor until its steps are done."""

    def __init__(
        self, plan: Plan, executor: Executor, models: dict[str, str], fds: dict[str, int], observer: Observer
    ) -> None:
        self.plan, self.executor, self.observer = plan, executor, observer
        self.table = Table(plan, regions(plan))
        self.ledger = Ledger()
        arenas = map_all(fds)
        self.local = Worker(
            plan, "driver", models, arenas, lambda message: self.inbox.append(("driver", message))
        )
        self.inbox: deque[tuple[str, FromWorker]] = deque()
        self.folds: dict[str, FoldState] = {}
        self.ready: dict[str, deque[Record]] = {
            n: deque() for n, h in plan.hops.items() if h.kind != "fold" and h.rows
        }
        self.triggers: dict[str, deque[int]] = {
            n: deque() for n, h in plan.hops.items() if h.kind != "fold" and not h.rows
        }
        self.latest: dict[tuple[str, str], Any] = {}
        self.in_flight: dict[int, Firing] = {}
        self.next_id = 0
        self.steps_done = 0
        self.began = self.step_began = time.monotonic()
        self.bytes_read: dict[str, int] = {}
        self.bytes_written: dict[str, int] = {}
        self.busy: dict[str, float] = dict.fromkeys(plan.owners, 0.0)

    # --- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until every owner holds its resources; then give every output with an initial value its first one."""
        self.local.start()
        self.inbox.clear()
        for name, hop in self.plan.hops.items():
            if hop.kind == "fold":
                self.folds[name] = _fold(hop, self.local)
        waiting = set(worker_owners(self.plan))
        while waiting:
            for owner, message in self.executor.wait(self.plan.run.deadline):
                if isinstance(message, Failed):
                    raise _error(message)
                waiting.discard(owner)
        for name, hop in self.plan.hops.items():
            for output, value in hop.initial.items():
                self._publish(name, output, value)
        self.began = self.step_began = time.monotonic()

    def run(self) -> None:
        """Turn until every step is trained, synced and evaluated. Raises RunError by name; never waits without a deadline."""
        while not self._finished():
            self._pump()
            if self._finished():
                break
            if not self.inbox:
                self.inbox.extend(self._wait())
            while self.inbox:
                self._take(self.inbox.popleft()[1])
        for key, place in list(self.ledger.place.items()):
            if place in ("in flight", "ready"):
                self.ledger.move(key, "dropped", "run ended")
        self.ledger.check()

    def save(self, directory: str) -> None:
        """Have the learner write its model. Does nothing in a graph without one."""
        for owner, spec in self.plan.owners.items():
            if spec.learner is not None:
                self.executor.send(owner, Save(directory))
                while True:
                    for _, message in self.executor.wait(self.plan.run.deadline):
                        if isinstance(message, Failed):
                            raise _error(message)
                        if isinstance(message, Saved):
                            return

    def _finished(self) -> bool:
        waiting = any(self.triggers.values()) or any(not f.record for f in self.in_flight.values())
        return self.steps_done >= self.plan.run.steps and not waiting

    def _wait(self) -> list[tuple[str, FromWorker]]:
        """The next messages. Raises RunError at once when nothing is in flight, DeadlineError when a firing is late."""
        if not self.in_flight:
            held = ", ".join(
                f"{n}: {len(q)} waiting"
                for f in self.folds.values()
                for n, q in ((f.hop.name, self._queued(f)),)
                if q
            )
            counts = self.ledger.counts
            raise RunError(
                f"nothing can fire at step {self.steps_done}: in flight {counts.in_flight}, ready {counts.ready}"
                + (f"; {held}" if held else ""),
                "a fold waits for more rows than it admits, or the dataset is exhausted; look at its options",
            )
        oldest = min(self.in_flight.values(), key=lambda f: f.began)
        deadline = self.plan.run.deadline
        try:
            return self.executor.wait(max(0.0, oldest.began + deadline - time.monotonic()))
        except DeadlineError:
            raise DeadlineError(
                f"hop {oldest.hop}{_who(oldest)} on owner {self.plan.hops[oldest.hop].owner} has run for {deadline:g} s",
                "raise run.deadline if that is right; else look at the owner's log",
            ) from None

    @staticmethod
    def _queued(fold: FoldState) -> list[Row]:
        return [row for queue in fold.queues.values() for row in queue]

    # --- turns ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Fire everything that can fire, to quiescence."""
        while self._fire_one_fold():
            pass
        for name in self.ready:
            self._send_ready(self.plan.hops[name])
        for name, keys in self.triggers.items():
            while keys and self._may_fire(self.plan.hops[name]):
                self._send_event(self.plan.hops[name], keys.popleft())

    def _fire_one_fold(self) -> bool:
        for fold in self.folds.values():
            if fold.events:
                port, value = fold.events.popleft()
                self._step(fold, {port: value})
                return True
        for fold in self.folds.values():
            for port, queue in fold.queues.items():
                if queue and fold.room(fold.state) > 0:
                    row = queue.popleft()
                    self._arrive(fold, row)
                    self._step(fold, {port: row})
                    return True
        for fold in self.folds.values():
            if fold.changed and self._has_credit(fold):
                fold.changed = False
                self._step(fold, {})
                return True
        return False

    def _has_credit(self, fold: FoldState) -> bool:
        """Whether what the fold would make has room downstream: its rows unread, and steps untrained."""
        hop = fold.hop
        if not hop.makes_rows or hop.rows == "trajectory":
            return True
        if hop.rows == "step":
            unfinished = self.table.next_key.get("step", 0) - self.steps_done
            return unfinished <= hop.queue and self.table.next_key.get("step", 0) < self.plan.run.steps
        return self._unread(hop.name) <= max(0, hop.queue - 1) and self.steps_done < self.plan.run.steps

    def _unread(self, producer: str) -> int:
        return sum(
            len(self.folds[h.name].queues[w.port])
            for h in self.plan.hops.values()
            for w in h.watches
            if w.producer == producer and h.name in self.folds and w.port in self.folds[h.name].queues
        )

    def _arrive(self, fold: FoldState, row: Row) -> None:
        """A row leaves a queue for a fold: a finished trajectory is registered as ready; a source may make another row."""
        if row.kind == "trajectory":
            self.ledger.move(row.key, "ready")
            record = self.table.of(row)
            self.table.free_blocks(record, ("firing", "trajectory"))
        for watch in fold.hop.watches:
            source = self.folds.get(watch.producer)
            if source is not None and source.hop.makes_rows:
                source.changed = True

    def _step(self, fold: FoldState, given: dict[str, Any]) -> None:
        """Call a fold once, and carry out its decisions."""
        ports: dict[str, Any] = {}
        for watch in fold.hop.watches:
            ports[watch.port] = given.get(watch.port)
            if watch.mode == "latest":
                ports[watch.port] = self.latest.get((watch.producer, watch.output), () if watch.rows else 0)
        try:
            result = fold.call(fold.state, **ports)
        except FlowgraphError:
            raise
        except Exception as error:
            raise HopError(
                f"fold {fold.hop.name}: {type(error).__name__}: {error}", f"see {fold.hop.place}"
            ) from error
        outputs = result._asdict() if hasattr(result, "_asdict") else {"out": result}
        made = False
        for name, kind in fold.hop.outputs.items():
            value = outputs[name]
            if kind == "rows" and not isinstance(value, tuple):
                made = bool(value) or made
                for item in value:
                    self._emit(fold.hop, item)
            elif isinstance(value, list):
                for item in value:
                    self._drop(fold.hop.name, name, item)
            else:
                self._publish(fold.hop.name, name, value)
        # A source goes on while its readers have room; any other fold waits for the next change.
        fold.changed = fold.changed or (made and fold.hop.makes_rows and not fold.hop.watches)

    # --- rows -------------------------------------------------------------------------------------------------

    def _emit(self, hop: Hop, item: Any) -> None:
        """A fold made a row: register it, write its columns, and wake who follows."""
        assert hop.rows is not None
        fields = item._asdict()
        parents = tuple(fields.pop("parents", ()))
        record = self.table.create(hop.rows, parents, int(fields.pop("tag", 0)))
        if hop.rows == "trajectory":
            self.ledger.register(record.row.key)
            self._close_older_groups(parents[0])
        if hop.rows == "step":
            for parent in parents:
                self.ledger.move(parent.key, "consumed")
                self.table.of(parent).closed = True
        lease = self.table.lease(hop.name)
        sizes: tuple[int, ...] = ()
        if lease >= 0:
            sizes, wrote = codec.write(hop, fields, self.local.views["driver"], lease)
            self._count(self.bytes_written, hop.name, wrote)
        self._give(record, hop.name, lease, sizes)

    def _close_older_groups(self, group: Row) -> None:
        """A group is closed once a later one is being sampled: no more trajectories will come from it."""
        for (kind, key), record in list(self.table.live.items()):
            if kind == "group" and key < group.key and not record.closed and record.given:
                self.table.close(record)

    def _give(self, record: Record, hop: str, lease: int, sizes: tuple[int, ...]) -> None:
        self.table.give(record, hop, lease, sizes)
        for name, queue in self.ready.items():
            other = self.plan.hops[name]
            if (
                other.rows == record.row.kind
                and hop in other.trigger
                and record.given.issuperset(other.trigger)
            ):
                if (record.row.key + 1) % other.every == 0:
                    queue.append(record)
                else:
                    record.given.add(name)
        for name, fold in self.folds.items():
            for watch in self.plan.hops[name].watches:
                if watch.producer == hop and watch.rows == record.row.kind:
                    if watch.mode == "event":
                        fold.events.append((watch.port, record.row))
                    elif watch.mode == "queue":
                        fold.queues[watch.port].append(record.row)
        if record.row.kind == "step":
            self._close_step(record)

    def _close_step(self, record: Record) -> None:
        """A step is over when every hop on steps is done with it."""
        names = {
            n for n, h in self.plan.hops.items() if h.rows == "step" and (h.kind != "fold" or h.makes_rows)
        }
        if record.given < names or record.closed:
            return
        self.steps_done += 1
        self._report(record)
        self.table.close(record)
        for fold in self.folds.values():
            fold.changed = True

    def _drop(self, hop: str, output: str, item: Dropped) -> None:
        self.ledger.move(item.row.key, "dropped", item.reason)
        self.table.close(self.table.of(item.row))
        self._publish(hop, output, item)

    def _publish(self, hop: str, output: str, value: Any) -> None:
        """A value output changed: overwrite it, and wake those who watch it."""
        if not isinstance(value, Dropped):
            if (hop, output) in self.latest and self.latest[hop, output] == value:
                return
            self.latest[hop, output] = value
        for name, other in self.plan.hops.items():
            for watch in other.watches:
                if (watch.producer, watch.output) == (hop, output):
                    self._wake(name, watch, value)

    def _wake(self, name: str, watch: Watch, value: Any) -> None:
        fold = self.folds.get(name)
        if fold is not None and watch.mode == "event":
            fold.events.append((watch.port, value))
        elif fold is not None:
            fold.changed = True
        elif watch.mode == "event" and (value % watch.every == 0 or value >= self.plan.run.steps):
            self.triggers[name].append(value)

    # --- firings ----------------------------------------------------------------------------------------------

    def _may_fire(self, hop: Hop) -> bool:
        if not hop.concurrent or hop.rows == "step":
            if any(f.hop == hop.name for f in self.in_flight.values()):
                return False
        held = {h for f in self.in_flight.values() for h in f.holds}
        if any((hop.name, output) in held for output in hop.initial):
            return False  # a value that somebody works on is not overwritten
        waiting = any(
            self.triggers[n]
            for n in self.triggers
            for w in self.plan.hops[n].watches
            if w.producer == hop.name
        )
        return not waiting and self.table.can_lease(hop.name)

    def _send_ready(self, hop: Hop) -> None:
        queue = self.ready[hop.name]
        while queue and self._may_fire(hop):
            record = queue.popleft()
            row = record.row
            producers = dict.fromkeys(r.producer for r in hop.reads)
            blocks = {p: self.table.blocks(row, p) for p in producers}
            leaves = (
                [parent.dims.get("leaf", 1) for parent in self._parents_now(row)]
                if row.kind == "step"
                else []
            )
            if row.kind == "trajectory":
                leaves = [row.dims.get("leaf", 1)]
            lease = self.table.lease(hop.name)
            self._send(
                hop,
                Fire(self.next_id, hop.name, row.key, blocks, leaves, {}, lease, self._omitted(hop, row.key)),
                record,
            )

    def _parents_now(self, row: Row) -> list[Row]:
        return [self.table.of(parent).row for parent in row.parents]

    def _omitted(self, hop: Hop, key: int) -> tuple[str, ...]:
        """Sets of tensors whose every reader skips this row: too large to write for nobody."""
        tensors = [c.name for c in hop.written if c.kind == "tensors"]
        return tuple(
            c for c in tensors if all((key + 1) % h.every for h, _ in self.plan.readers(hop.name, c))
        )

    def _send_event(self, hop: Hop, value: int) -> None:
        watch = next(w for w in hop.watches if w.mode == "event")
        holds = ((watch.producer, watch.output),)
        self._send(hop, Fire(self.next_id, hop.name, value, {}, [], {watch.port: value}, -1), None, holds)

    def _send(
        self, hop: Hop, fire: Fire, record: Record | None, holds: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.in_flight[fire.id] = Firing(hop.name, record, fire.lease, time.monotonic(), holds)
        self.next_id += 1
        if hop.owner == "driver":
            self.local.handle(fire)
        else:
            self.executor.send(hop.owner, fire)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Failed):
            raise _error(message, _who(self.in_flight[message.id]) if message.id in self.in_flight else "")
        if not isinstance(message, Done):
            return
        firing = self.in_flight.pop(message.id)
        hop = self.plan.hops[firing.hop]
        self.busy[hop.owner] += message.seconds
        self._count(self.bytes_read, hop.name, message.read)
        self._count(self.bytes_written, hop.name, message.wrote)
        named = {f"{hop.name}.{key}": value for key, value in message.scalars.items()}
        if firing.record is None:
            if named:
                self.observer.event(
                    {"step": self.steps_done, "seconds": round(time.monotonic() - self.began, 3), **named}
                )
        else:
            firing.record.scalars.update(named)
            self._give(firing.record, hop.name, firing.lease, message.sizes)
        for output, value in message.values.items():
            self._publish(hop.name, output, value)
            self.table.expire(value - 1)
        for fold in self.folds.values():
            fold.changed = True

    # --- what is told -----------------------------------------------------------------------------------------

    @staticmethod
    def _count(total: dict[str, int], hop: str, nbytes: dict[str, int]) -> None:
        for name, n in nbytes.items():
            total[f"{hop}.{name}"] = total.get(f"{hop}.{name}", 0) + n

    def _report(self, record: Record) -> None:
        now = time.monotonic()
        rows = self._parents_now(record.row)
        tokens = sum(row.dims.get("token", 0) for row in rows)
        lags = [record.row.key - row.tag for row in rows]
        counts = self.ledger.counts
        self.ledger.check()
        self.observer.step(
            {
                "step": record.row.key + 1,
                "seconds": round(now - self.began, 3),
                "step_seconds": round(now - self.step_began, 3),
                "tokens": tokens,
                "tokens_per_second": round(tokens / max(1e-9, now - self.step_began), 1),
                "lag_mean": sum(lags) / max(1, len(lags)),
                "lag_max": max(lags, default=0),
                "in_flight": counts.in_flight,
                "ready": counts.ready,
                "dropped": sum(counts.dropped.values()),
                **_mean([self.table.of(row).scalars for row in rows]),
                **record.scalars,
            }
        )
        self.step_began = now


def _fold(hop: Hop, local: Worker) -> FoldState:
    spec, fixed = fill(hop, local.resources)
    queues: dict[str, deque[Row]] = {w.port: deque() for w in hop.watches if w.mode == "queue"}

    def room(state: Any) -> int:
        return spec.facts.room(state, **fixed) if spec.facts.room is not None else 1

    return FoldState(
        hop, functools.partial(spec.function, **fixed), room, spec.state(), deque(), queues, changed=True
    )


def _mean(scalars: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it."""
    names = dict.fromkeys(name for one in scalars for name in one)
    values = {name: [one[name] for one in scalars if name in one] for name in names}
    return {name: sum(v) / len(v) for name, v in values.items()}


def _who(firing: Firing) -> str:
    """The row that a firing works on, for messages."""
    if firing.record is None:
        return ""
    row = firing.record.row
    return f" (step {row.key + 1})" if row.kind == "step" else f" ({row.kind} {row.key}, uid {row.uid})"


def _error(message: Failed, who: str = "") -> RunError:
    error = ERRORS.get(message.code, HopError)(message.error + who, message.help)
    error.__notes__ = [message.detail]
    return error
