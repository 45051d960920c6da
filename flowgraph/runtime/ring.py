"""The driver: it fires folds and sends firings to workers, and holds nothing but ledgers and descriptors.

One turn is: take the messages that have come, fire folds until none has anything to do, then send every firing
whose rows are complete. Within a turn nothing is stale.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from flowgraph.errors import DeadlineError, LedgerError, RunError
from flowgraph.plan.layout import spans
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime import reading, writing
from flowgraph.runtime.arena import map_all, regions
from flowgraph.runtime.blame import member_of
from flowgraph.runtime.executors import Executor, worker_owners
from flowgraph.runtime.firing import Firing, error_of, said_of, who, with_row
from flowgraph.runtime.folds import Fold, Folds
from flowgraph.runtime.ledger import Ledger
from flowgraph.runtime.messages import Block, Done, Failed, Fire, FromWorker, Part
from flowgraph.runtime.meter import Meter
from flowgraph.runtime.rows import Record, Table
from flowgraph.runtime.worker import Worker, alone, failed
from flowgraph.spec.types import Dropped, Row


class Observer(Protocol):
    """Who is told what happened: metrics.jsonl, the live view, a test."""

    def step(self, record: dict[str, Any]) -> None: ...

    def event(self, record: dict[str, Any]) -> None: ...


class Ring:
    """Runs one plan on one executor until its steps are done.

    waits: hop → those that must be done with a row before it, and the hops that fire with it, can fire
    ready: hop → complete rows that it has yet to work on; triggers: hop → values that it has yet to fire on
    over: steps that are done before an earlier one
    ended: a source has no further row; final: and what fires on the last version is queued
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        models: Mapping[str, str],
        fds: Mapping[str, int],
        observer: Observer,
    ) -> None:
        self.plan, self.executor, self.observer = plan, executor, observer
        self.inbox: deque[tuple[str, FromWorker]] = deque()
        self.local = Worker(plan, "driver", models, map_all(fds), lambda m: self.inbox.append(("driver", m)))
        self.folds: Folds
        self.table = Table(plan, regions(plan))
        self.ledger = Ledger()
        self.meter = Meter(list(plan.owners))
        workers = {name: hop for name, hop in plan.hops.items() if hop.kind != "fold"}
        self.waits = {n: _waits(plan, h) for n, h in workers.items() if h.rows and h.heads}
        self.ready: dict[str, deque[Record]] = {name: deque() for name in self.waits}
        self.triggers: dict[str, deque[int]] = {n: deque() for n, h in workers.items() if not h.rows}
        self.in_flight: dict[int, Firing] = {}
        self.next_id = 0
        self.steps_done = 0
        self.over: dict[int, Record] = {}
        self.ended = False
        self.final = False

    # --- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until every owner holds its resources; then give every output with an initial value its first one."""
        try:
            alone(self.local.start())
            self.folds = Folds(self.plan, self.local.resources)
        except Exception as error:
            raise error_of(failed(-1, "owner driver could not start", error)) from error
        self.inbox.clear()
        waiting = dict.fromkeys(worker_owners(self.plan))
        while waiting:
            try:
                messages = self.executor.wait(self.plan.run.deadline)
            except DeadlineError as late:
                raise DeadlineError(
                    f"owner {', '.join(waiting)} did not start: {late.message}", late.help
                ) from None
            for owner, message in messages:
                if isinstance(message, Failed):
                    raise error_of(message)
                waiting.pop(owner, None)
        self.executor.control_bytes = 0  # the plan that every worker got is no step's
        for name, hop in self.plan.hops.items():
            for output, value in hop.initial.items():
                self._publish(name, output, value)
        self.meter.start()

    def run(self) -> None:
        """Turn until every step is trained, synced and evaluated. Raises RunError by name; no wait lacks a deadline."""
        while True:
            self._pump()
            if self._exhausted() and self._last_events():
                continue
            if self._finished() or self._exhausted():
                break
            if not self.inbox:
                self.inbox.extend(self._wait())
            while self.inbox:
                self._take(self.inbox.popleft()[1])
        for key, place in list(self.ledger.place.items()):
            if place in ("in flight", "ready"):
                self.ledger.move(key, "dropped", "the run", "run ended")
        self.ledger.check()

    def _finished(self) -> bool:
        waiting = any(self.triggers.values()) or any(not f.record for f in self.in_flight.values())
        return self.steps_done >= self.plan.run.steps and not waiting

    def _exhausted(self) -> bool:
        """Whether a source has ended, and all that came of it is trained, so that no further step can be made."""
        return self.ended and self.steps_done > 0 and not self.in_flight and not self.inbox

    def _last_events(self) -> bool:
        """Queue what waits for the last version, which has come early. False when nothing does, and the second time."""
        if self.final:
            return False
        self.final = True
        for name, values in self.triggers.items():
            for watch in self.plan.hops[name].watches:
                last = self.folds.latest.get((watch.producer, watch.output))
                if watch.mode == "event" and last is not None and last % watch.every:
                    values.append(last)
        return any(self.triggers.values())

    def _wait(self) -> Iterable[tuple[str, FromWorker]]:
        """The next messages. Raises RunError at once when nothing is in flight, DeadlineError when one is late."""
        if not self.in_flight:
            counts = self.ledger.counts
            waiting = self.folds.waiting()
            queued = "".join(f"; {n} rows wait for {name}" for name, n in waiting.items())
            at = (
                f"look at the options of {' and '.join(waiting)}"
                if waiting
                else "look at the options of the batch"
            )
            help = f"a fold waits for more rows than it admits: {at}"
            if self.ended:
                help = "the dataset ended before a batch was complete: give it more rows, or lower dims.group"
            raise RunError(
                f"nothing can fire at step {self.steps_done}: "
                f"in flight {counts.in_flight}, ready {counts.ready}{queued}",
                help,
            )
        late = min(self.in_flight.values(), key=lambda f: f.began + self._patience(f))
        patience = self._patience(late)
        try:
            return self.executor.wait(max(0.0, late.began + patience - time.monotonic()))
        except DeadlineError:
            hop = self.plan.hops[late.hop]
            what = f"hops {' → '.join(hop.group)}" if hop.group else f"hop {hop.name}"
            raise DeadlineError(
                f"{what}{who(late)} on owner {hop.owner} has run for {patience:g} s",
                "raise run.deadline if that is right; else look at the owner's log",
            ) from None

    def _patience(self, firing: Firing) -> float:
        """Seconds that a firing may take: what each hop may, for as many as fire as one."""
        return self.plan.run.deadline * max(1, len(self.plan.hops[firing.hop].group))

    # --- turns ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Fire everything that can fire, to quiescence."""
        while (found := self.folds.next(self._has_credit)) is not None:
            self._step(*found)
        for name, queue in self.ready.items():
            while queue and self._may_fire(self.plan.hops[name], queue[0]):
                self._fire(self.plan.hops[name], queue.popleft())
        for name, values in self.triggers.items():
            while values and self._may_fire(self.plan.hops[name]):
                self._fire_on(self.plan.hops[name], values.popleft())

    def _has_credit(self, hop: Hop) -> bool:
        """Whether what a fold would make has room: groups unread, steps untrained. Dispatch bounds itself."""
        if not hop.makes_rows or hop.rows == "trajectory":
            return True
        if not self.table.can_lease(hop.name):
            return False
        made = self.table.next_key.get("step", 0)
        if hop.rows == "step":
            return made - self.steps_done <= hop.queue and made < self.plan.run.steps
        return self.table.unread[hop.name] < max(1, hop.queue) and self.steps_done < self.plan.run.steps

    def _step(self, fold: Fold, port: str, value: Any) -> None:
        """Fire a fold once, and carry out its decisions."""
        columns = self._columns(fold, value)  # before the row is taken, and what lives no longer is freed
        if isinstance(value, Row) and port in fold.queues:
            self._taken(value, fold.hop.name)
        made = False
        for name, output in self.folds.fire(fold, port, value, columns).items():
            kind = fold.hop.outputs[name]
            if kind == "rows":
                made |= bool(output)
                for item in output:
                    self._emit(fold.hop, item)
            elif kind == "latest":
                self._publish(fold.hop.name, name, tuple(output))
            elif isinstance(output, list):
                for item in output:
                    self._drop(fold.hop.name, name, item)
            else:
                self._publish(fold.hop.name, name, output)
        if not fold.hop.watches:
            # A source goes on while its readers have room; any other fold waits for the next change.
            fold.changed |= made
            self.ended = not made

    def _columns(self, fold: Fold, value: Any) -> dict[str, dict[int, Any]]:
        """What a fold reads of the rows that it is shown: port → key of the row → value, each read once."""
        if not fold.hop.reads:
            return {}
        shown = {
            row.key: row for row in self.folds.shown(fold, value) if (row.kind, row.key) in self.table.live
        }
        reader = reading.Reader(self.plan, self.local.views)
        for key in fold.read.keys() - shown.keys():
            del fold.read[key]
        for key in shown.keys() - fold.read.keys():
            blocks = {p: self.table.blocks(shown[key], p) for p in fold.hop.takes}
            inputs = reader.inputs(fold.hop, blocks, [shown[key].dims.get("leaf", 1)], {})
            for producer, read in blocks.items():
                self.meter.lengths(fold.hop, producer, read)
            self.meter.count(fold.hop, inputs.nbytes, {}, inputs.homes)
            fold.read[key] = reading.kept(inputs.values)
        return {r.port: {key: fold.read[key][r.port] for key in shown} for r in fold.hop.reads}

    def _taken(self, row: Row, fold: str) -> None:
        """A row leaves a queue for a fold: a finished trajectory is ready; whoever made the row may go on."""
        if self.table.take(row) and row.kind == "trajectory":
            self.ledger.move(row.key, "ready", fold)
        self.folds.wake_all()

    # --- rows -------------------------------------------------------------------------------------------------

    def _emit(self, hop: Hop, item: Any) -> None:
        """A fold made a row: register it, write its columns, and wake who follows."""
        fields = item._asdict()
        parents = tuple(fields.pop("parents", ()))
        record = self.table.create(hop.name, parents, int(fields.pop("tag", 0)))
        if hop.rows == "trajectory":
            self.ledger.register(record.row.key, hop.name)
            self.table.close_groups_before(parents[0])
        if hop.rows == "step":
            for parent in parents:
                self.ledger.move(parent.key, "consumed", hop.name)
                self.table.of(parent).closed = True
        leases = self.table.lease(hop.name)
        lease = leases.get(hop.name, -1)
        try:
            if self.plan.verify:
                writing.verify(hop, fields)
            # Where no column has a place too: its sizes are what folds see of the row.
            given = writing.checked(hop, hop.checked, fields)
            sizes, wrote = writing.write(hop, fields, given, self.local.views["driver"], lease)
            self.meter.count(hop, {}, wrote, {})
        except RunError as error:
            leaves = [parent.dims.get("leaf", 1) for parent in parents]
            member = member_of(error, self.plan, hop, fields, leaves)
            raise with_row(error, said_of(record.row, member)) from error
        self._give(record, hop.name, lease, sizes)

    def _give(self, record: Record, hop: str, offset: int, sizes: tuple[int, ...]) -> None:
        """A hop is done with a row: queue the row for every hop that waited for just this, and tell the folds."""
        self.table.give(record, hop, offset, sizes)
        self._follow(record, hop)
        record.queued += self.folds.offer(
            hop, record.row, () if record.left else self.table.workers[record.maker]
        )
        if record.row.kind == "step" and not record.left:
            self._close_step(record)

    def _follow(self, record: Record, hop: str) -> None:
        """Queue a row for the hops that waited for this one. A hop that skips the row is done with it as it is."""
        for name, queue in self.ready.items():
            waits = self.waits[name]
            if hop not in waits or not record.left.isdisjoint(waits):
                continue
            other = self.plan.hops[name]
            if self.plan.fires(other, record.row.key):
                queue.append(record)
                continue
            for skipped in other.group or (name,):
                record.left.discard(skipped)
                self._follow(record, skipped)

    def _close_step(self, record: Record) -> None:
        """Every hop on steps is done with this one: close it once those before it are, so that all is told in order."""
        self.over[record.row.key] = record
        while (first := self.over.pop(self.steps_done, None)) is not None:
            self.steps_done += 1
            self.ledger.check()
            members = [self.table.of(parent) for parent in first.row.parents]
            self.observer.step(self.meter.step(first, members, self.ledger.counts))
            self.table.close(first)
        self.folds.wake_all()

    def _drop(self, hop: str, output: str, item: Dropped) -> None:
        self.ledger.move(item.row.key, "dropped", hop, item.reason)
        record = self.table.of(item.row)
        if record.left:
            raise LedgerError(
                f"hop {hop} can't drop trajectory {item.row.key}: {', '.join(sorted(record.left))} is not done with it",
                f"let {hop} drop rows that it takes from a queue, or that a pool shows it",
            )
        self.table.close(record)
        self._publish(hop, output, item)

    def _publish(self, hop: str, output: str, value: Any) -> None:
        """A value output has a value: folds see it; hops that fire on it get each `every`-th, and the last."""
        if not self.folds.publish(hop, output, value):
            return
        for name, values in self.triggers.items():
            for watch in self.plan.hops[name].watches:
                due = (watch.producer, watch.output, watch.mode) == (hop, output, "event")
                if due and (value % watch.every == 0 or value >= self.plan.run.steps):
                    values.append(value)

    # --- firings ----------------------------------------------------------------------------------------------

    def _may_fire(self, hop: Hop, record: Record | None = None) -> bool:
        """Groups and steps go one at a time and in order; a value that somebody works on, or will, is not overwritten.

        A version waits for the steps before its own: what it lets dispatch send takes the place of their rows.
        """
        if hop.initial and hop.rows == "step" and record is not None and record.row.key > self.steps_done:
            return False
        one_at_a_time = not hop.concurrent or hop.rows in ("group", "step")
        if one_at_a_time and any(f.hop == hop.name for f in self.in_flight.values()):
            return False
        held = {f.holds for f in self.in_flight.values()}
        if any((hop.name, output) in held for output in hop.initial):
            return False
        for name, values in self.triggers.items():
            if values and any(watch.producer == hop.name for watch in self.plan.hops[name].watches):
                return False
        return self.table.can_lease(hop.name)

    def _fire(self, hop: Hop, record: Record) -> None:
        row = record.row
        group = [self.plan.hops[name] for name in hop.group or (hop.name,)]
        blocks: dict[str, list[Block]] = {}
        for one in group:
            for producer in sorted(one.takes):
                blocks.setdefault(producer, self.table.blocks(row, producer))
        members = [self.table.of(parent).row for parent in row.parents] if row.kind == "step" else [row]
        leaves = [one.dims.get("leaf", 1) for one in members]
        # Sets of tensors whose every reader skips this row are too large to write for nobody.
        omit = tuple(f"{one.name}.{c}" for one in group for c in self._skipped(one, row.key))
        leases = self.table.lease(hop.name)
        fire = Fire(self.next_id, hop.name, row.key, blocks, leaves, self._sampled(hop), leases, omit)
        self._send(hop, record, None, fire)

    def _skipped(self, hop: Hop, key: int) -> list[str]:
        tensors = [c.name for c in hop.written if c.kind == "tensors"]
        readers = {c: self.plan.readers(hop.name, c) for c in tensors}
        return [c for c in tensors if not any(self.plan.fires(h, key) for h, _ in readers[c])]

    def _fire_on(self, hop: Hop, value: int) -> None:
        watch = next(w for w in hop.watches if w.mode == "event")
        fire = Fire(self.next_id, hop.name, value, {}, [], {**self._sampled(hop), watch.port: value}, {})
        self._send(hop, None, (watch.producer, watch.output), fire)

    def _sampled(self, hop: Hop) -> dict[str, Any]:
        """The newest values of the ports that never block."""
        return {
            w.port: self.folds.latest.get((w.producer, w.output), 0)
            for w in hop.watches
            if w.mode == "latest"
        }

    def _send(self, hop: Hop, record: Record | None, holds: tuple[str, str] | None, fire: Fire) -> None:
        began = time.monotonic()
        self.in_flight[fire.id] = Firing(hop.name, record, fire.leases, began, holds, fire.blocks)
        self.next_id += 1
        self.meter.begins(hop.owner)
        if hop.owner == "driver":
            self.local.handle(fire)
        else:
            self.executor.send(hop.owner, fire)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Failed):
            firing = self.in_flight.get(message.id)
            raise error_of(message, who(firing, message.member) if firing is not None else "")
        if not isinstance(message, Done):
            return
        firing = self.in_flight.pop(message.id)
        self.meter.ends(self.plan.hops[firing.hop].owner)
        for part in message.parts:
            self._took(firing, part)
        self.folds.wake_all()

    def _took(self, firing: Firing, part: Part) -> None:
        """What one hop of a firing gave: its blocks, its numbers, and the values that others watch."""
        hop = self.plan.hops[part.hop]
        self.meter.count(hop, part.read, part.wrote, part.homes)
        for producer in sorted(hop.takes):
            self.meter.lengths(hop, producer, firing.blocks[producer])
        named = {**part.scalars, "seconds": round(part.seconds, 4)}
        scalars = {f"{hop.name}.{key}": value for key, value in named.items()}
        if firing.record is not None:
            firing.record.scalars.update(scalars)
            offset = firing.leases.get(hop.name, -1)
            if hop.home != hop.owner and offset >= 0:
                offset = self._relay(hop, offset, part)
            self._give(firing.record, hop.name, offset, part.sizes)
        else:
            self.observer.event({"step": self.steps_done, "seconds": self.meter.seconds, **scalars})
        for output, value in part.values.items():
            self._publish(hop.name, output, value)
            if output in hop.initial:  # it is a version
                self.table.expire(value - 1)

    def _relay(self, hop: Hop, offset: int, part: Part) -> int:
        """Without `defer`, payload passes through the driver's memory. Returns where the block lies there."""
        where = spans(hop, dict(zip(hop.dims, part.sizes, strict=True)))
        size = max((s.start + s.nbytes for s in where.values()), default=0)
        at = self.table.land(hop.name, offset)
        self.local.views["driver"][at : at + size] = self.local.views[hop.owner][offset : offset + size]
        self.meter.driver_bytes += sum(part.wrote.values())
        return at


def _waits(plan: Plan, hop: Hop) -> frozenset[str]:
    """What a group waits for: what any of its hops waits for, but for each other."""
    group = hop.group or (hop.name,)
    return frozenset(t for name in group for t in plan.hops[name].trigger) - frozenset(group)
