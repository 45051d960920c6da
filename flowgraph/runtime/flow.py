"""What happens to rows: folds fire, hops are due, trajectories are counted, steps are closed. No payload, no clock.

Whoever runs a ring says what a firing is: the driver sends it to a process, a simulator lets it end when a clock of
its own says so. All that decides which trajectory goes out when, and which may still be trained on, is here and in the
folds.

One turn is: fire folds until none has anything to do, then begin every firing that is due. Within a turn nothing is
stale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowgraph.errors import LedgerError, RunError
from flowgraph.passes.sizes import rows_per_step
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime.folds import Fold, Folds, listed
from flowgraph.runtime.ledger import MOVES, Ledger
from flowgraph.runtime.rows import Kept, Record, Table
from flowgraph.spec.types import Dropped, Row

IN_VAIN = 1000  # batches' worth of trajectories that may be dropped before a step is made of others


class Flow(ABC):
    """One run of a plan.

    ready: hop → rows that are due; due: hops that have any; triggers: hop → values that it has yet to fire on
    triggered: output → those of the hops that fire on its values, and on each how-manieth
    versions: outputs that are versions; fires: those, and those of `triggered`
    free: hops that may begin on a row whatever else is under way, as soon as there is a block for it
    firing: hop → its firings under way; held: published values that somebody works on
    engines: hops on trajectories that use an engine, and may be interrupted
    hold: how many of the youngest are to wait; stopping: those that were told to; parked: those that do, by their key
    in_vain: trajectories dropped since the last step was made; batch: trajectories of a step
    recounted: events of the ledger when it was recounted; steps_made, steps_done: batches that were chosen, are over
    over: steps that are done before an earlier one
    ended: a source has no further row; final: and what fires on the last version is queued
    """

    folds: Folds

    def __init__(self, plan: Plan, table: Table) -> None:
        self.plan, self.table = plan, table
        self.ledger = Ledger()
        workers = {name: hop for name, hop in plan.hops.items() if hop.kind != "fold"}
        self.ready: dict[str, deque[Record]] = {name: deque() for name in table.waits}
        self.due: dict[str, None] = {}
        self.triggers: dict[str, deque[int]] = {n: deque() for n, h in workers.items() if not h.rows}
        self.triggered: dict[tuple[str, str], list[tuple[deque[int], int]]] = {}
        for name, values in self.triggers.items():
            for w in (w for w in workers[name].watches if w.mode == "event"):
                self.triggered.setdefault((w.producer, w.output), []).append((values, w.every))
        self.versions = {(name, output) for name, hop in plan.hops.items() for output in hop.initial}
        self.fires = self.versions | self.triggered.keys()
        self.free = {
            name
            for name in table.waits
            if plan.hops[name].concurrent
            and not plan.hops[name].initial
            and plan.hops[name].rows == "trajectory"
        }
        self.firing = dict.fromkeys(workers, 0)
        self.held: Counter[tuple[str, str]] = Counter()
        engines = (
            n for n, h in workers.items() if h.rows == "trajectory" and h.uses == "engine" and h.concurrent
        )
        self.engines = tuple(engines)
        self.hold = 0
        self.stopping: set[tuple[str, int]] = set()
        self.parked: dict[tuple[str, int], Record] = {}
        self.in_vain = 0
        self.batch = max(1, int(rows_per_step("trajectory", plan.dims)))
        # Where nobody asks for the largest lag there is none.
        bounded = any("max_lag" in hop.bound for hop in plan.hops.values())
        self.max_lag = plan.max_lag if bounded else math.inf
        self.recounted = 0
        self.steps_made = self.steps_done = 0
        self.over: dict[int, Record] = {}
        self.ended = False
        self.final = False

    # --- what whoever runs it does ----------------------------------------------------------------------------

    @abstractmethod
    def columns(self, fold: Fold, rows: Sequence[Row]) -> dict[str, dict[int, Any]]:
        """What a fold reads of rows that it is shown: port → key of the row → value."""

    @abstractmethod
    def write(self, record: Record, hop: Hop, item: Any) -> tuple[Kept | None, tuple[int, ...]]:
        """Keep the columns of a row that a fold made. Returns the block, if there is one, and its sizes."""

    @abstractmethod
    def begin(self, hop: Hop, record: Record) -> None:
        """A hop is due on a row; `done` or `fail` is called when it is over."""

    @abstractmethod
    def begin_on(self, hop: Hop, port: str, value: int) -> None:
        """A hop is due on a value that was published; `done` is called when it is over."""

    @abstractmethod
    def working(self, hop: str) -> Mapping[int, Any]:
        """What a hop works on, by the key of its row: whatever `interrupt` wants to know of it."""

    @abstractmethod
    def interrupt(self, hop: Hop, firing: Any) -> None:
        """A hop is to give up a row for now; `done` and then `park` is called when it has, unless it is done before."""

    def landed(self, record: Record) -> None:  # noqa: B027  (who measures nothing has nothing to do)
        """A trajectory is in flight no more. Of interest to whoever measures that."""

    @abstractmethod
    def closed(self, record: Record, members: Sequence[Record]) -> None:
        """A step is over, and so are those before it."""

    # --- life -------------------------------------------------------------------------------------------------

    def open(self, resources: Mapping[str, Any]) -> None:
        """Make every fold, and give every output with an initial value its first one."""
        self.folds = Folds(self.plan, resources)
        for name, hop in self.plan.hops.items():
            for output, value in hop.initial.items():
                self.publish(name, output, value)

    def finished(self) -> bool:
        """Whether every step is trained, synced and evaluated."""
        return (
            self.steps_done >= self.plan.run.steps and not any(self.triggers.values()) and not self._events()
        )

    def _events(self) -> bool:
        """Whether a firing is under way that no row waits for."""
        return any(self.firing[name] for name in self.triggers)

    def under_way(self) -> int:
        return sum(self.firing.values())

    def exhausted(self) -> bool:
        """Whether a source has ended, and all that came of it is trained, so that no further step can be made."""
        return self.ended and self.steps_done > 0 and not self.under_way()

    def last_events(self) -> bool:
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

    def end(self) -> None:
        """The run is over: what is still in flight or ready is dropped, and everything is counted once more."""
        for key, record in self.table.live["trajectory"].items():
            if record.place in MOVES:
                self.ledger.move(record, key, "dropped", "the run", "run ended")
        self.check()

    def check(self) -> None:
        """Recount the ledger. Raises LedgerError when its sum does not hold."""
        self.ledger.check(self.table.live["trajectory"].values())
        self.recounted = self.ledger.counts.events

    def denied(self) -> set[str]:
        """Folds that would make another row if they had credit."""
        folds = self.folds.all.values()
        gated = {fold.hop.name for fold in folds if fold.gated and fold.changed}
        told = {f.hop.name for f in folds if f.credit and self.steps_made < self.plan.run.steps}
        return gated | {name for name in told if self._credit(self.plan.hops[name]) <= 0}

    def stuck(self) -> RunError:
        """Nothing is under way and nothing can fire."""
        counts = self.ledger.counts
        full = {name for name, fold in self.folds.all.items() if fold.is_full()}
        waiting = {name: n for name, n in self.folds.waiting().items() if name not in full}
        queued = "".join(f"; {n} rows wait for {name}" for name, n in waiting.items())
        queued += f"; {len(self.parked)} are held" if self.parked else ""
        at = f"options of {' and '.join(waiting)}" if waiting else "options of the batch"
        help = f"a fold waits for more rows than it admits: look at the {at}"
        if self.ended:
            help = "the dataset ended before a batch was complete: give it more rows, or lower dims.group"
        text = f"nothing can fire at step {self.steps_done}: in flight {counts.in_flight}, ready {counts.ready}{queued}"
        return RunError(text, help)

    # --- turns ------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Fire everything that can fire, to quiescence."""
        step, find, credit, table = self._step, self.folds.next, self._credit, self.table
        free, needs = self.free, table.needs
        given_up = True
        while given_up:
            while (found := find(credit, table.freed)) is not None:
                fold, port, value = found
                step(fold, port, value)
            if self.hold or self.parked or self.stopping:
                self._hold()
            given_up = False
            for name in list(self.due):
                hop, queue = self.plan.hops[name], self.ready[name]
                while queue:
                    record = queue[0]
                    if record.row.failed:
                        given_up = True
                        self._skip(queue.popleft(), hop)
                    elif (name in free and not needs[name]) or self._may_fire(hop, record):
                        queue.popleft()
                        self.firing[name] += 1
                        self.begin(hop, record)
                    else:
                        break
                else:
                    del self.due[name]
        for name, values in self.triggers.items():
            if not values:
                continue
            hop = self.plan.hops[name]
            while values and self._may_fire(hop):
                watch = next(w for w in hop.watches if w.mode == "event")
                self.firing[name] += 1
                self.held[watch.producer, watch.output] += 1
                self.begin_on(hop, watch.port, values.popleft())

    def _credit(self, hop: Hop) -> int:
        """How many rows a fold may make now: groups unread, steps untrained. Dispatch bounds itself."""
        if hop.rows == "step":
            made = self.steps_made
            room = min(hop.queue + 1 - (made - self.steps_done), self.plan.run.steps - made)
        elif not hop.makes_rows or hop.rows == "trajectory":
            return 1
        else:
            room = (
                max(1, hop.queue) - self.table.unread[hop.name]
                if self.steps_done < self.plan.run.steps
                else 0
            )
        return room if room > 0 and self.table.can_lease(hop.name) else 0

    def _may_fire(self, hop: Hop, record: Record | None = None) -> bool:
        """Groups and steps go one at a time and in order; a value that somebody works on, or will, is not overwritten.

        A version waits for the steps before its own: what it lets dispatch send takes the place of their rows.
        """
        if hop.name in self.free:
            return self.table.can_lease(hop.name)
        if self.firing[hop.name] and (not hop.concurrent or hop.rows in ("group", "step")):
            return False
        if hop.initial:
            if hop.rows == "step" and record is not None and record.row.key > self.steps_done:
                return False
            if any(self.held[hop.name, output] for output in hop.initial):
                return False
            for name, values in self.triggers.items():
                if values and any(watch.producer == hop.name for watch in self.plan.hops[name].watches):
                    return False
        return self.table.can_lease(hop.name)

    def _step(self, fold: Fold, port: str, value: Any) -> None:
        """Fire a fold once, and carry out its decisions."""
        hop = fold.hop
        record: Record | None = None
        if port in fold.taken:
            record = value
            value = value.row
        columns: Mapping[str, Any] = {}
        if hop.reads:  # before the row is taken, and what lives no longer is freed
            shown = self.folds.shown(fold, port, value)
            columns = self.columns(
                fold, [r for r in shown if not r.failed and r.key in self.table.live[r.kind]]
            )
        if record is not None and self.table.take(record) and record.place == "in flight":
            self.ledger.move(record, value.key, "ready", hop.name)
            self.landed(record)
        credit = self._credit(hop) if fold.credit or hop.rows != "trajectory" else 0
        made, last = 0, fold.last
        for i, output in enumerate(self.folds.fire(fold, port, value, columns, credit)):
            if output == last[i]:
                continue
            kind, key = fold.outputs[i]
            if kind == "rows":
                made = len(output) if type(output) is list else len(listed(fold, key[1], output))
                if made > credit and hop.rows != "trajectory":
                    self._too_many(hop, made, credit)
                for item in output:
                    self._emit(hop, item)
            elif kind == "handed":
                for row in output if type(output) is list else listed(fold, key[1], output):
                    self.folds.hand(key, row)
            elif kind == "latest":
                self._publish(key, tuple(listed(fold, key[1], output)))
            elif isinstance(output, list):
                last[i] = []  # as good as nothing from now on
                for item in output:
                    self._drop(key, item)
            else:
                last[i] = output
                if kind == "held":
                    self.hold = output
                self._publish(key, output)
        if made and hop.rows != "trajectory":
            fold.changed = True  # it may make another as soon as it has credit
        if not hop.watches:
            self.ended = not made

    def _too_many(self, hop: Hop, made: int, credit: int) -> None:
        what = f"hop {hop.name} makes {made} {hop.rows} rows at once, and there is room for {credit}"
        raise LedgerError(what, "make one at a time, and none without credit")

    # --- rows -------------------------------------------------------------------------------------------------

    def _emit(self, hop: Hop, item: Any) -> None:
        """A fold made a row: register it, write its columns, and wake who follows."""
        parents = tuple(getattr(item, "parents", ()))
        if hop.rows == "step":
            self.in_vain = 0
            for parent in parents:
                self._consume(parent, hop.name)
            self.steps_made += 1
        record = self.table.create(hop.name, parents, int(getattr(item, "tag", 0)))
        if hop.rows == "trajectory":
            self.ledger.register(record)
            if self.table.sampling[0] is not record.parents[0]:  # a later group, most likely
                self.table.close_groups_before(parents[0])
        kept, sizes = self.write(record, hop, item)
        self.give(record, hop.name, kept, sizes)

    def _consume(self, row: Row, by: str) -> None:
        record = self.table.live["trajectory"].get(row.key)
        self.ledger.move(record, row.key, "consumed", by)
        assert record is not None, "the ledger has refused it else"
        if record.row.failed:
            raise LedgerError(
                f"hop {by} can't choose trajectory {row.key}: it came to nothing ({record.row.failed})",
                f"let {by} drop the rows of which `failed` says why",
            )
        lag = self.steps_made - row.tag
        if lag > self.max_lag:
            text = f"hop {by} trains trajectory {row.key} at a lag of {lag}, and max_lag is {self.max_lag}"
            raise LedgerError(text, f"let {by} drop what is older when it makes a step")
        record.closed = True

    def give(self, record: Record, hop: str, kept: Kept | None = None, sizes: tuple[int, ...] = ()) -> None:
        """A hop is done with a row: the row is due for every hop that waited for just this, and folds are told.

        kept: its block, None where it wrote none
        """
        if sizes or kept is not None:
            self.table.give(record, hop, kept, sizes)
        for events, port in self.folds.told[hop]:  # who watches its rows as events learns of it at once
            events.append((port, record.row))
        self._leave(record, hop)
        if record.stage.left or record.whole:
            return
        record.whole = True
        record.queued += self.folds.queue(record)
        if record.row.kind == "step":
            self._close_step(record)

    def _leave(self, record: Record, hop: str) -> None:
        """A row is due for the hops that waited for this one. A hop that skips the row is done with it as it is."""
        stage = record.stage
        record.stage, due = stage.after.get(hop) or self.table.after(stage, hop)
        for name in due:
            other = self.plan.hops[name]
            if record.row.failed:
                self._skip(record, other)
            elif other.every == 1 or self.plan.fires(other, record.row.key):
                self.ready[name].append(record)
                self.due[name] = None
            else:
                for skipped in other.group or (name,):
                    self._leave(record, skipped)

    def done(self, hop: Hop, record: Record | None, watched: str = "") -> None:
        """A firing is over. watched: the port whose value it worked on, where that made it fire."""
        self.firing[hop.name] -= 1
        if self.stopping and record is not None:
            self.stopping.discard((hop.name, record.row.key))
        if watched:
            watch = next(w for w in hop.watches if w.port == watched)
            self.held[watch.producer, watch.output] -= 1

    def fail(self, record: Record, hop: Hop, reason: str) -> None:
        """A firing came to nothing, and its row with it: no further hop begins on it, and the folds decide."""
        if not record.row.failed:
            record.row = msgspec.structs.replace(record.row, failed=reason)
        self._skip(record, hop)

    def _hold(self) -> None:
        """Of the trajectories at an engine, let the youngest wait, and the oldest of those that do go on."""
        if len(self.parked) + len(self.stopping) == self.hold * len(self.engines):
            return
        for name in self.engines:
            stopping = [key for hop, key in self.stopping if hop == name]
            parked = sorted(key for hop, key in self.parked if hop == name)
            more = self.hold - len(parked) - len(stopping)
            working = self.working(name) if more > 0 else {}
            for key in sorted(working.keys() - set(stopping), reverse=True)[: max(0, more)]:
                self.stopping.add((name, key))
                self.interrupt(self.plan.hops[name], working[key])
            for key in reversed(parked[: max(0, -more)]):
                self.ready[name].appendleft(self.parked.pop((name, key)))
                self.due[name] = None

    def park(self, record: Record, hop: Hop) -> None:
        """A firing was interrupted: its row waits, as if the hop had never begun, until it is held no more."""
        self.parked[hop.name, record.row.key] = record

    def _skip(self, record: Record, hop: Hop) -> None:
        """A row that came to nothing passes a hop, and those that fire with it, without their part."""
        for name in hop.group or (hop.name,):
            self.give(record, name)

    def _close_step(self, record: Record) -> None:
        """Every hop on steps is done with this one: close it once those before it are, so that all is told in order."""
        self.over[record.row.key] = record
        while (first := self.over.pop(self.steps_done, None)) is not None:
            self.steps_done += 1
            # As many events as there are trajectories: to count them then costs each event a constant.
            if self.ledger.counts.events - self.recounted >= len(self.table.live["trajectory"]):
                self.check()
            self.closed(first, first.parents)
            self.table.close(first)
            self.table.freed += 1
        for fold in self.folds.all.values():
            fold.changed |= bool(fold.credit)  # there is more of it

    def _drop(self, output: tuple[str, str], item: Dropped) -> None:
        hop, key = output[0], item.row.key
        record = self.table.live["trajectory"].get(key)
        flies = record is not None and record.place == "in flight"
        self.ledger.move(record, key, "dropped", hop, item.reason)
        assert record is not None, "the ledger has refused it else"
        if flies:
            self.landed(record)
        self.in_vain += 1
        if self.in_vain > IN_VAIN * self.batch:
            text = f"{self.in_vain} trajectories were dropped by {hop} since step {self.steps_made}, and none trained"
            raise RunError(text, f"look at what {hop} drops; the last was dropped for: {item.reason}")
        if not record.whole:
            left = ", ".join(sorted(record.stage.left))
            raise LedgerError(
                f"hop {hop} can't drop trajectory {key}: {left} is not done with it",
                f"let {hop} drop rows that it takes from a queue, or that a pool shows it",
            )
        self.table.close(record)
        self._publish(output, item)

    def publish(self, hop: str, output: str, value: Any) -> None:
        """A value output has a value: folds see it; hops that fire on it get each `every`-th, and the last."""
        self._publish((hop, output), value)

    def _publish(self, output: tuple[str, str], value: Any) -> None:
        if not self.folds.publish(output, value) or output not in self.fires:
            return
        for values, every in self.triggered.get(output, ()):
            if value % every == 0 or value >= self.plan.run.steps:
                values.append(value)
        if output in self.versions:
            self.table.expire(value - 1)
