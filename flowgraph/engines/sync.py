"""Sync of one replica as a state machine: which of its five actions is allowed when, and a journal of what happened.

    serving ─pause→ paused ─release→ released ─update→ updating ─resume→ resumed ─continue→ serving

Whatever fails, in whatever way, the replica is `out`: it serves nothing, and the only way on is from the start. Pausing
what is paused, or updating what was half updated, is harmless; the machine is what keeps the order, because a server
may not notice: releasing memory under a running request kills SGLang on a GPU, and does nothing at all on a CPU.
"""

from __future__ import annotations

import asyncio
import itertools
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
# What each may take of the time that is left before it counts as hung, so that there is time to start anew.
SHARE: dict[str, float] = {"update": 0.5, "start": 0.75}
QUICK_SHARE = 0.25


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
        return self.state == "serving" and self.active is None and self.version == version


class Entry(msgspec.Struct, frozen=True):
    """A line of the journal: what a replica was asked at an attempt, and what came of it.

    at: seconds since the epoch; seconds: how long it took; said: why it failed, or why there was nothing to do
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

    until: of the event loop's clock; no attempt outlives it. Each action may take a share of what is left. A replica
    that does not answer in its share hangs, and is killed where it is ours; one whose process ended is started first.

    Raises the last ReplicaError or TimeoutError when the attempts or the time are used up; the replica is then `out`.
    Any other error is a fault of the caller's (weights of another model), and is raised at once.
    """
    clock = asyncio.get_running_loop().time
    pushed = 0

    async def do(attempt: int, name: str, call: Callable[[float], Awaitable[Any]]) -> Any:
        began = clock()

        def note(outcome: Literal["begun", "done", "failed"], said: str = "") -> None:
            took = clock() - began
            journal(Entry(time.time(), replica.name, version, attempt, name, outcome, took, said))

        if began >= until:
            raise TimeoutError(f"no time was left to {name}")
        limit = (until - began) * SHARE.get(name, QUICK_SHARE)
        note("begun")
        try:
            async with asyncio.timeout(limit):  # unlike wait_for, never misses that it is cancelled itself
                result = await call(limit)
        except TimeoutError as error:
            said = str(error) or f"it did not {name} in {limit:.1f} s"
            note("failed", said)
            replica.kill()
            raise TimeoutError(said) from error
        except BaseException as error:
            note("failed", str(error) or type(error).__name__)
            raise
        note("done", result if isinstance(result, str) else "")
        return result

    calls: dict[Action, Callable[[float], Awaitable[Any]]] = {
        "pause": lambda _: replica.pause(pause),
        "release": lambda _: replica.release(),
        "update": lambda _: replica.update(weights, version),
        "resume": lambda _: replica.resume(),
        "continue": lambda _: replica.proceed(),
    }
    for attempt in itertools.count(1):
        try:
            if sync.state == "out" or not replica.alive():
                await do(attempt, "start", replica.start)
            for action, call in calls.items():
                sync.begin(action)
                result = await do(attempt, action, call)
                if action == "update":
                    pushed += result
                sync.done(action, version)
            return Brought(attempt, pushed)
        except (ReplicaError, TimeoutError):
            sync.failed()
            if attempt == attempts or clock() >= until:
                raise
            await asyncio.sleep(min(0.1 * 2**attempt, until - clock()))
        except BaseException:
            sync.failed()
            raise
    raise AssertionError  # the loop ends by return or raise
