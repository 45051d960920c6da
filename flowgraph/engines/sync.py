"""Sync of one replica as a state machine: which of its five actions is allowed when, and a journal of what happened.

    serving ─pause→ paused ─release→ released ─update→ updating ─resume→ resumed ─continue→ serving

Whatever fails, in whatever way, the replica is `out`: it serves nothing, and the only way on is from the start. Pausing
what is paused, or updating what was half updated, is harmless; the machine is what keeps the order, because a server
may not notice: releasing memory under a running request kills SGLang on a GPU, and does nothing at all on a CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from flowgraph.engines.protocol import PauseMode, Replica

State = Literal["serving", "paused", "released", "updating", "resumed", "out"]
Action = Literal["pause", "release", "update", "resume", "continue"]

# Action → the states that it may begin in, and the one that it leads to.
ORDER: dict[Action, tuple[tuple[State, ...], State]] = {
    "pause": (("serving", "paused", "released", "updating", "resumed", "out"), "paused"),
    "release": (("paused",), "released"),
    "update": (("released",), "updating"),
    "resume": (("updating",), "resumed"),
    "continue": (("resumed",), "serving"),
}
ACTIONS: tuple[Action, ...] = tuple(ORDER)


class ReplicaError(Exception):
    """A replica did not do what it was asked. Whether it had an effect is unknown; it can be tried again."""


class Sync(msgspec.Struct):
    """Where one replica is. version: of the weights it is known to hold in full, -1 when that is not known."""

    state: State = "out"
    version: int = -1
    active: Action | None = None

    def begin(self, action: Action) -> None:
        """Raises RuntimeError for an action out of order; the replica has then not been asked."""
        allowed, _ = ORDER[action]
        if self.active is not None or self.state not in allowed or (action == "resume" and self.version < 0):
            busy = f" while {self.active} is under way" if self.active else ""
            raise RuntimeError(f"{action} in state {self.state}{busy}; it is for {' or '.join(allowed)}")
        self.active = action
        if action == "update":
            self.state, self.version = "updating", -1  # from now on the weights may be of two versions

    def done(self, action: Action, version: int = -1) -> None:
        """The replica did it. version: that an update has landed in full."""
        assert self.active == action
        self.active, self.state = None, ORDER[action][1]
        if action == "update":
            self.version = version

    def failed(self) -> None:
        """It did not, or nobody knows."""
        self.active, self.state = None, "out"

    def serves(self, version: int) -> bool:
        return self.state == "serving" and self.version == version


class Entry(msgspec.Struct, frozen=True):
    """A line of the journal: what a replica was asked at an attempt, and what came of it.

    at: seconds since the epoch; seconds: how long it took; said: why it failed
    """

    at: float
    replica: str
    version: int
    attempt: int
    action: str
    outcome: Literal["begun", "done", "failed"]
    seconds: float = 0.0
    said: str = ""


Journal = Callable[[Entry], None]


class Brought(msgspec.Struct, frozen=True):
    """A replica serves a version. attempts: it took; pushed: bytes that were sent to it"""

    attempts: int
    pushed: int


async def bring(
    replica: Replica,
    sync: Sync,
    weights: Any,
    version: int,
    *,
    pause: PauseMode,
    until: float,
    journal: Journal,
    attempts: int = 3,
) -> Brought:
    """Take a replica from whatever state to serving `version`; from the start again after a failure.

    until: of `time.monotonic`; no attempt outlives it. Each action may take half of what is left, so that one that
    hangs leaves time for another attempt. A replica whose process ended is started first.

    Raises the last ReplicaError or TimeoutError when the attempts or the time are used up; the replica is then `out`.
    Any other error is a fault of the caller's (weights of another model), and is raised at once.
    """
    attempt = pushed = 0
    while True:
        attempt += 1

        async def do(name: str, what: Awaitable[Any], attempt: int = attempt) -> Any:
            began, wall = time.monotonic(), time.time()
            journal(Entry(wall, replica.name, version, attempt, name, "begun"))
            try:
                result = await asyncio.wait_for(what, max(0.0, until - began) / 2)
            except BaseException as error:
                said = str(error) or type(error).__name__
                took = time.monotonic() - began
                journal(Entry(time.time(), replica.name, version, attempt, name, "failed", took, said))
                raise
            took = time.monotonic() - began
            journal(Entry(time.time(), replica.name, version, attempt, name, "done", took))
            return result

        calls: dict[Action, Callable[[], Awaitable[Any]]] = {
            "pause": lambda: replica.pause(pause),
            "release": replica.release,
            "update": lambda: replica.update(weights, version),
            "resume": replica.resume,
            "continue": replica.proceed,
        }
        try:
            if attempt > 1 or not replica.alive():
                await do("start", replica.start(max(0.0, until - time.monotonic()) / 2))
            for action, call in calls.items():
                sync.begin(action)
                result = await do(action, call())
                if action == "update":
                    pushed += result
                sync.done(action, version)
            return Brought(attempt, pushed)
        except (ReplicaError, TimeoutError):
            sync.failed()
            if attempt == attempts or time.monotonic() >= until:
                raise
            await asyncio.sleep(min(0.1 * 2**attempt, max(0.0, until - time.monotonic())))
        except BaseException:
            sync.failed()
            raise
