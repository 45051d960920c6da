"""Idle shares: where the time of every owner and every hop went.

busy     at least one of its firings is being worked on
blocked  none is, but it has work that it may not begin: a row or value is due for it and waits for room, for its turn,
         or for a hop that was sent to its owner before; or rows wait for the fold that would make its rows, which
         admits no more (credit, capacity, the version)
starved  none is, and there is nothing to work on

An owner is busy when one of its hops is, else blocked when one is. Hops that are no coroutines are worked on one at a
time, in the order in which they were sent to their owner. A fold takes next to no time: it is blocked while rows wait
for it or it has no credit for another, else starved. The driver is busy while it waits for no message. All is looked at
when the driver has done what it can; until it has news, nobody's state changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Literal, NamedTuple

from flowgraph.plan.plan import Hop, Plan

State = Literal["busy", "starved", "blocked"]
# owners or hops → name → state → share of the time, in [0, 1]
Table = dict[str, dict[str, dict[State, float]]]


class Unit(NamedTuple):
    """A hop, or those that fire as one. makers: folds that make the rows it works on; alone: it is no coroutine"""

    hop: str
    owner: str
    makers: frozenset[str]
    alone: bool


class Clock:
    """Seconds that somebody spent in each state."""

    def __init__(self, now: float) -> None:
        self.state: State = "starved"
        self.since = now
        self.seconds: dict[State, float] = {"busy": 0.0, "starved": 0.0, "blocked": 0.0}

    def enter(self, state: State, now: float) -> None:
        if state != self.state:
            self.seconds[self.state] += now - self.since
            self.state, self.since = state, now

    def until(self, now: float) -> dict[State, float]:
        return {s: n + (now - self.since if s == self.state else 0.0) for s, n in self.seconds.items()}


class Shares:
    """Clocks of a plan's owners and hops. Time is given, so it may be any clock's; it never runs backwards."""

    def __init__(self, plan: Plan, now: float) -> None:
        hops = plan.hops.values()
        workers = {hop.name: plan.workers(hop.name) for hop in hops if hop.makes_rows}
        self.units = {
            " → ".join(hop.group or (hop.name,)): Unit(
                hop.name,
                hop.owner,
                frozenset(maker for maker, names in workers.items() if hop.name in names),
                not hop.concurrent,
            )
            for hop in hops
            if hop.kind != "fold" and hop.heads
        }
        self.firing = dict.fromkeys((unit.hop for unit in self.units.values()), 0)
        self.line: dict[str, deque[str]] = {owner: deque() for owner in plan.owners}
        self.folds = [hop.name for hop in hops if hop.kind == "fold"]
        self.owners = {name: Clock(now) for name in plan.owners}
        self.hops = {name: Clock(now) for name in (*self.folds, *self.units)}
        self.began = self.step_began = now
        self._before = self._seconds(now)

    def begins(self, hop: Hop) -> None:
        """A firing is sent to the hop's owner."""
        self.firing[hop.name] += 1
        if not hop.concurrent:
            self.line[hop.owner].append(hop.name)

    def ends(self, hop: Hop) -> None:
        self.firing[hop.name] -= 1
        if not hop.concurrent:
            self.line[hop.owner].popleft()

    def look(self, now: float, waiting: Collection[str], denied: Collection[str]) -> None:
        """The driver waits from now on. waiting: hops for which something is due, folds for which rows wait;
        denied: folds that would make a row, and have no credit.
        """
        owners: dict[str, State] = dict.fromkeys(self.owners, "starved")
        for name, unit in self.units.items():
            state: State = "starved"
            if self.firing[unit.hop] and not (unit.alone and self.line[unit.owner][0] != unit.hop):
                state = "busy"
            elif self.firing[unit.hop] or unit.hop in waiting or not unit.makers.isdisjoint(waiting):
                state = "blocked"
            self.hops[name].enter(state, now)
            if unit.owner != "driver" and owners[unit.owner] != "busy" and state != "starved":
                owners[unit.owner] = state
        for name in self.folds:
            self.hops[name].enter("blocked" if name in waiting or name in denied else "starved", now)
        for owner, state in owners.items():
            self.owners[owner].enter(state, now)

    def wake(self, now: float) -> None:
        """The driver has messages to work on."""
        self.owners["driver"].enter("busy", now)

    def busy_seconds(self, now: float) -> dict[str, float]:
        return {owner: clock.until(now)["busy"] for owner, clock in self.owners.items()}

    def step(self, now: float) -> Table:
        """Shares of the time since the last step."""
        seconds, before, took = self._seconds(now), self._before, now - self.step_began
        self._before, self.step_began = seconds, now
        return _table(seconds, before, took)

    def run(self, now: float) -> Table:
        """Shares of all the time."""
        return _table(self._seconds(now), {}, now - self.began)

    def _seconds(self, now: float) -> dict[str, dict[str, dict[State, float]]]:
        kinds = {"owners": self.owners, "hops": self.hops}
        return {kind: {n: clock.until(now) for n, clock in clocks.items()} for kind, clocks in kinds.items()}


def idle(shares: Table) -> dict[str, float]:
    """Owner → the share of the time in which it was not busy; the driver, who only sees to the others, left out."""
    owners = shares["owners"].items()
    return {name: round(1 - states["busy"], 3) for name, states in owners if name != "driver"}


def _table(seconds: Table, before: Table, took: float) -> Table:
    return {
        kind: {
            name: {
                state: round((n - (before[kind][name][state] if before else 0.0)) / max(took, 1e-9), 3)
                for state, n in states.items()
            }
            for name, states in named.items()
        }
        for kind, named in seconds.items()
    }
