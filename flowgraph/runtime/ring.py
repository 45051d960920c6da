"""The driver: it sends firings to workers, and holds nothing but ledgers and descriptors.

What fires when is `flow.Flow`; here are the messages, the blocks of payload that firings read and write, and the
deadlines. One turn is: take the messages that have come, then let the flow turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from flowgraph.errors import DeadlineError, RunError
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime import reading, writing
from flowgraph.runtime.blame import member_of
from flowgraph.runtime.desk import Desk, block_bytes, column_bytes
from flowgraph.runtime.executors import Executor, worker_owners
from flowgraph.runtime.firing import Firing, error_of, said_of, who, with_row
from flowgraph.runtime.flow import Flow
from flowgraph.runtime.folds import Fold
from flowgraph.runtime.leases import regions
from flowgraph.runtime.messages import Block, Done, Failed, Fire, FromWorker, Gone, Interrupt, Part, picked
from flowgraph.runtime.meter import Meter
from flowgraph.runtime.rows import Kept, Record, Table
from flowgraph.runtime.transport import Transport
from flowgraph.runtime.worker import Worker, alone, failed
from flowgraph.spec.types import Row


class Observer(Protocol):
    """Who is told what happened: metrics.jsonl, the live view, a test."""

    def step(self, record: dict[str, Any]) -> None: ...

    def event(self, record: dict[str, Any]) -> None: ...


class Ring(Flow):
    """Runs one plan on one executor until its steps are done. in_flight: firings under way, by their number"""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        models: Mapping[str, str],
        memory: Transport,
        observer: Observer,
    ) -> None:
        super().__init__(plan, Table(plan, regions(plan)))
        self.executor, self.observer = executor, observer
        self.inbox: deque[tuple[str, FromWorker]] = deque()
        arenas = memory.open("driver", plan.owners["driver"].maps)
        self.local = Worker(plan, "driver", models, arenas, lambda m: self.inbox.append(("driver", m)))
        self.meter = Meter(plan)
        self.in_flight: dict[int, Firing] = {}
        self.next_id = 0

    # --- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until every owner holds its resources; then give every output with an initial value its first one."""
        try:
            alone(self.local.start())
            self.open(self.local.resources)
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
        self.meter.start()

    def run(self) -> None:
        """Turn until every step is trained, synced and evaluated. Raises RunError by name; no wait lacks a deadline."""
        while True:
            self.turn()
            exhausted = self.exhausted() and not self.inbox
            if exhausted and self.last_events():
                continue
            if self.finished() or exhausted:
                break
            if not self.inbox:
                self.meter.look(self)
                self.inbox.extend(self._wait())
                self.meter.wake()
            while self.inbox:
                self._take(self.inbox.popleft()[1])
        self.end()

    def _wait(self) -> Iterable[tuple[str, FromWorker]]:
        """The next messages. Raises RunError at once when nothing is in flight, DeadlineError when one is late."""
        if not self.in_flight:
            raise self.stuck()
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

    def closed(self, record: Record, members: Sequence[Record]) -> None:
        self.observer.step(self.meter.step(record, members, self))

    # --- payload of folds -------------------------------------------------------------------------------------

    def columns(self, fold: Fold, rows: Sequence[Row]) -> dict[str, dict[int, Any]]:
        """Each is read once, while the fold is shown its row."""
        shown = {row.key: row for row in rows}
        reader = reading.Reader(self.plan, self.local.views)
        for key in fold.read.keys() - shown.keys():
            del fold.read[key]
        for key in shown.keys() - fold.read.keys():
            blocks = {p: self.table.blocks(shown[key], p) for p in fold.hop.takes}
            inputs = reader.inputs(fold.hop, blocks, [shown[key].dims.get("leaf", 1)], {})
            for producer, read in blocks.items():
                self.meter.lengths(fold.hop, producer, read)
            met = reading.met_driver(fold.hop, inputs.homes)
            self.meter.count_read(fold.hop, inputs.nbytes, inputs.nbytes, met)
            fold.read[key] = reading.kept(inputs.values)
        return {r.port: {key: fold.read[key][r.port] for key in shown} for r in fold.hop.reads}

    def write(self, record: Record, hop: Hop, item: Any) -> tuple[Kept | None, tuple[int, ...]]:
        fields = {name: value for name, value in item._asdict().items() if name not in ("parents", "tag")}
        leases = self.table.lease(hop.name)
        try:
            if self.plan.verify:
                writing.verify(hop, fields)
            # Where no column has a place too: its sizes are what folds see of the row.
            given = writing.checked(hop, hop.checked, fields)
            stored = self._desk().store(hop, fields, given)
            self.meter.count_written(hop, stored.wrote)
        except RunError as error:
            leaves = [parent.dims.get("leaf", 1) for parent in record.row.parents]
            member = member_of(error, self.plan, hop, fields, leaves)
            raise with_row(error, said_of(record.row, member)) from error
        return self._kept(hop, leases.get(hop.name), *stored[:3]), stored.sizes

    def _desk(self) -> Desk:
        """The driver's own, which has heard of all that is over."""
        self.local.desk.free(self.table.told("driver"))
        return self.local.desk

    def _kept(
        self, hop: Hop, lease: int | None, offset: int, nbytes: int, sizes: tuple[int, ...]
    ) -> Kept | None:
        """What was written on a lease, if there was any."""
        if lease is None:
            return None
        self.table.desks[hop.name].settle(lease, offset, nbytes)
        return Kept(Block(offset, sizes), lease)

    # --- firings ----------------------------------------------------------------------------------------------

    def begin(self, hop: Hop, record: Record) -> None:
        row = record.row
        self.meter.trains(hop, record, self)
        group = [self.plan.hops[name] for name in hop.group or (hop.name,)]
        blocks: dict[str, list[Block]] = {}
        for one in group:
            for producer in sorted(one.takes):
                blocks.setdefault(producer, self.table.blocks(row, producer))
        members = [parent.row for parent in record.parents] if row.kind == "step" else [row]
        leaves = [one.dims.get("leaf", 1) for one in members]
        # Sets of tensors whose every reader skips this row are too large to write for nobody.
        omit = tuple(f"{one.name}.{c}" for one in group for c in self._skipped(one, row.key))
        leases = self.table.lease(hop.name)
        over = self.table.told(hop.owner)
        fire = Fire(self.next_id, hop.name, row.key, blocks, leaves, self._sampled(hop), over, omit)
        self._send(hop, record, "", fire, leases)

    def _skipped(self, hop: Hop, key: int) -> list[str]:
        tensors = [c.name for c in hop.written if c.kind == "tensors"]
        readers = {c: self.plan.readers(hop.name, c) for c in tensors}
        return [c for c in tensors if not any(self.plan.fires(h, key) for h, _ in readers[c])]

    def begin_on(self, hop: Hop, port: str, value: int) -> None:
        over = self.table.told(hop.owner)
        fire = Fire(self.next_id, hop.name, value, {}, [], {**self._sampled(hop), port: value}, over)
        self._send(hop, None, port, fire, {})

    def working(self, hop: str) -> dict[int, int]:
        firings = self.in_flight.items()
        return {f.record.row.key: id for id, f in firings if f.hop == hop and f.record is not None}

    def interrupt(self, hop: Hop, firing: int) -> None:
        self.executor.send(hop.owner, Interrupt(firing))

    def _sampled(self, hop: Hop) -> dict[str, Any]:
        """The newest values of the ports that never block."""
        return {
            w.port: self.folds.latest.get((w.producer, w.output), 0)
            for w in hop.watches
            if w.mode == "latest"
        }

    def _send(
        self, hop: Hop, record: Record | None, watched: str, fire: Fire, leases: dict[str, int]
    ) -> None:
        began = time.monotonic()
        self.in_flight[fire.id] = Firing(hop.name, record, leases, began, watched, fire.blocks)
        self.next_id += 1
        self.meter.shares.begins(hop)
        if hop.owner == "driver":
            self.local.handle(fire)
        else:
            self.executor.send(hop.owner, fire)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Failed):
            firing = self.in_flight.get(message.id)
            raise error_of(message, who(firing, message.member) if firing is not None else "")
        if not isinstance(message, Done | Gone):
            return
        firing = self.in_flight.pop(message.id)
        hop = self.plan.hops[firing.hop]
        self.meter.shares.ends(hop)
        self.done(hop, firing.record, firing.watched)
        if isinstance(message, Gone):
            assert firing.record is not None, "only a firing on a trajectory is given up"
            self.table.unlease(firing.leases)
            if message.reason:
                self.fail(firing.record, hop, message.reason)
            else:
                self.park(firing.record, hop)
            return
        for name, part in zip(hop.group or (hop.name,), message.parts, strict=True):
            self._took(self.plan.hops[name], firing, part)

    def _took(self, hop: Hop, firing: Firing, part: Part) -> None:
        """What one hop of a firing gave: its blocks, its numbers, and the values that others watch."""
        read = {one.port: n for one, n in zip(hop.reads, part.read, strict=True)}
        wrote = column_bytes(hop, part.sizes)
        self.meter.count_read(hop, read, picked(read, part.joined), part.driver)
        self.meter.count_written(hop, wrote, picked(wrote, part.placed))
        for producer in sorted(hop.takes):
            self.meter.lengths(hop, producer, firing.blocks[producer])
        named = {**part.scalars, "seconds": round(part.seconds, 4)}
        scalars = {f"{hop.name}.{key}": value for key, value in named.items()}
        for output, value in part.values.items():  # a step is over only with its version
            self.publish(hop.name, output, value)
        if firing.record is not None:
            firing.record.scalars = {**firing.record.scalars, **scalars}
            kept = self._kept(hop, firing.leases.get(hop.name), part.offset, part.nbytes, part.sizes)
            if hop.home != hop.owner and kept is not None:
                kept = self._relay(hop, kept, part)
            self.give(firing.record, hop.name, kept, part.sizes)
        else:
            self.observer.event({"step": self.steps_done, "seconds": self.meter.seconds, **scalars})

    def _relay(self, hop: Hop, kept: Kept, part: Part) -> Kept:
        """Without `defer`, payload passes through the driver's memory. The block there."""
        start, size = part.offset, block_bytes(hop, part.sizes)
        at = self._desk().take(hop.name, size)
        self.local.views["driver"][at : at + size] = self.local.views[hop.owner][start : start + size]
        self.meter.count_relayed(hop, column_bytes(hop, part.sizes))
        return Kept(Block(at, part.sizes), self.table.land(hop.name, kept.lease, at, size))
