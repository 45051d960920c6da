"""Which replicas serve, and how those that don't are brought back: the weights' side of a fleet.

A replica is in rotation while it serves the target, the newest version. At most one task at a time asks it the five
actions of a sync: a sync's own, or one that brings it back after it was lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from flowgraph.engines.protocol import PAUSE_MODES, EngineLoad, PauseMode, Replica, Synced
from flowgraph.engines.sync import Brought, Entry, Journal, ReplicaError, Sync, bring
from flowgraph.errors import EngineFailed

AFFINE = 4096  # prompts whose replica is remembered
FAILURES = (ReplicaError, TimeoutError)  # of a replica; any other is a fault of what it was asked


class Member:
    """A replica in the fleet: where it is in a sync, and the requests that it has."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.sync = Sync()
        self.requests: set[str] = set()
        self.heard = (0.0, 0.0)  # what it had computed, and when that was heard
        self.bringing: asyncio.Task[Brought] | None = None
        self.failure = ""
        self.given_up = asyncio.Event()

    def give_up(self) -> None:
        """What it was asked goes to others."""
        self.given_up.set()
        self.given_up = asyncio.Event()


class Rotation:
    """stage: takes the weights of a version once, and gives what every replica's `update` is handed; it stays valid
        until the next call, so that a replica that is replaced later gets them too
    initial: the same for version 0, the model's own files
    patience: seconds that one may wait for a replica, and that a replica may take to be brought back
    slack: how many more requests the replica that has a prompt cached may have than the least loaded one
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        stage: Callable[[Mapping[str, Any], int], Any],
        initial: Any,
        journal: Journal,
        patience: float,
        slack: int,
    ) -> None:
        assert replicas
        self.members = [Member(replica) for replica in replicas]
        self.stage, self._staged = stage, initial
        self._journal, self._patience, self._slack = journal, patience, slack
        self.version = self.target = 0
        self._affine: OrderedDict[bytes, Member] = OrderedDict()
        self._changed = asyncio.Event()
        self._syncing = False
        self._closed = False

    async def start(self, *, fresh: bool) -> None:
        """Start every replica, side by side. fresh: they have just loaded version 0; else it is brought to them.

        Raises EngineFailed unless all of them serve.
        """
        until = _now() + self._patience

        async def one(member: Member) -> None:
            async with asyncio.timeout_at(until):
                await member.replica.start(self._patience)
            if fresh:
                member.sync, member.heard = Sync("serving", 0), (0.0, _now())
            else:
                await self._bring(member, "abort", until)
            await member.replica.load()

        problems = await asyncio.gather(*map(one, self.members), return_exceptions=True)
        for member, problem in zip(self.members, problems, strict=True):
            if problem is not None:
                if isinstance(problem, FAILURES):
                    raise EngineFailed(
                        f"replica {member.replica.name} did not start: {said(problem)}",
                        "see its log, or run flowgraph doctor; one at a URL has to run there already",
                    ) from problem
                raise problem

    async def choose(self, prompt: bytes | None, unwanted: Callable[[], bool]) -> Member | None:
        """A replica in rotation, waited for; None when it is unwanted meanwhile. EngineFailed when none serves.

        prompt: a digest of it; None for what leaves nothing in a prefix cache
        """
        until = _now() + self._patience
        while not unwanted():
            if self._closed:
                raise RuntimeError("the engine is closed")
            ready = [m for m in self.members if m.sync.serves(self.target)]
            if ready:
                return self._prefer(ready, prompt)
            hopeless = not self._syncing and not any(m.bringing for m in self.members)
            if hopeless or _now() >= until:
                raise self._none_serves()
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
        return None

    def _prefer(self, ready: list[Member], prompt: bytes | None) -> Member:
        least = min(ready, key=lambda m: len(m.requests))
        if prompt is None:
            return least
        known = self._affine.get(prompt)
        if known in ready and len(known.requests) <= len(least.requests) + self._slack:
            least = known
        self._affine[prompt] = least
        self._affine.move_to_end(prompt)
        if len(self._affine) > AFFINE:
            self._affine.popitem(last=False)
        return least

    def wake(self) -> None:
        """Whoever waits for a replica may look whether it is still wanted."""
        self._changed.set()

    # --- weights ----------------------------------------------------------------------------------------------

    async def sync(
        self,
        weights: Mapping[str, Any],
        version: int,
        *,
        pause: PauseMode = "retract",
        seconds: float = 300.0,
    ) -> Synced:
        """See `Engine.sync`."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._syncing:
            raise RuntimeError(f"a sync to version {self.target} is under way")
        if pause not in PAUSE_MODES or not seconds > 0:
            raise ValueError(
                f"pause is one of {', '.join(PAUSE_MODES)} and seconds above 0, not {pause!r} and {seconds}"
            )
        if not 0 <= version < 1 << 31:
            raise ValueError(f"a version is a 32-bit count, unlike {version}")
        began = _now()
        self._syncing = True
        try:
            await self._stop_bringing()  # nobody may read the stage while it is written
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._take(weights, version)
            # A replica that was out before comes back by itself, and holds nobody up.
            known = [m for m in self.members if m.sync.state == "serving"] or self.members
            self._recover(*(m for m in self.members if m not in known))
            tasks = [
                self._begin_bringing(m, pause if m.sync.state == "serving" else "abort", began + seconds)
                for m in known
            ]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self._until_one_serves(began + seconds)
            serving = [m for m in self.members if m.sync.serves(version)]
            faults = [r for r in results if isinstance(r, Exception) and not isinstance(r, FAILURES)]
            if self._closed or faults or not serving:
                await self._abandon()
                raise next(iter(faults), self._none_serves())
        except asyncio.CancelledError:
            await self._abandon()
            raise
        finally:
            self._syncing = False
            self._changed.set()
        self.version = version
        self._recover(*(m for m in self.members if m not in serving))
        brought = [r for r in results if isinstance(r, Brought)]
        return Synced(
            version,
            _now() - began,
            sum(b.pushed for b in brought),
            len(serving),
            sum(b.attempts - 1 for b in brought),
        )

    def _take(self, weights: Mapping[str, Any], version: int) -> None:
        """From here on no replica is in rotation until it serves this version. Raises ValueError for weights that don't
        fit; then the replicas serve on, and come back, with what they had.
        """
        try:
            self._staged = self.stage(weights, version)
        except ValueError:
            self._recover(*(m for m in self.members if m.sync.state == "out"))
            raise
        self.target = version

    async def _until_one_serves(self, until: float) -> None:
        """Or until there is no hope, or no time."""
        while not any(m.sync.serves(self.target) for m in self.members):
            under_way = [m.bringing for m in self.members if m.bringing is not None]
            if not under_way or _now() >= until:
                return
            await asyncio.wait(under_way, timeout=until - _now(), return_when=asyncio.FIRST_COMPLETED)

    async def _bring(self, member: Member, pause: PauseMode, until: float) -> Brought:
        """Bring one replica to the target, and let waiting requests know."""
        try:
            brought = await bring(
                member.replica,
                member.sync,
                self._staged,
                self.target,
                pause=pause,
                until=until,
                journal=self._journal,
            )
            member.heard = (member.heard[0], _now())
            return brought
        except Exception as error:
            member.failure = said(error)
            member.give_up()
            raise
        finally:
            self._changed.set()

    def _begin_bringing(self, member: Member, pause: PauseMode, until: float) -> asyncio.Task[Brought]:
        """In a task of its own, the only one to ask the five actions of this replica; a sync or the end may end it."""
        assert member.bringing is None
        name = f"bring {member.replica.name}"
        task = asyncio.get_running_loop().create_task(self._bring(member, pause, until), name=name)
        member.bringing = task

        def over(task: asyncio.Task[Brought]) -> None:
            member.bringing = None
            self._changed.set()
            if not task.cancelled():
                task.exception()  # its member and the journal say why

        task.add_done_callback(over)
        return task

    async def _abandon(self) -> None:
        """Until the next sync nobody is brought back, and nobody waits for them."""
        await self._stop_bringing()
        for member in self.members:
            if member.sync.state == "out":
                member.give_up()

    def lost(self, member: Member, error: Exception) -> None:
        """A replica did not answer: out of rotation with it, and bring it back, unless that is under way."""
        if member.sync.state == "serving" and member.sync.active is None:
            member.failure = said(error)
            member.sync.failed()
            where = member.replica.name
            self._journal(Entry(time.time(), where, self.target, 0, "serve", "failed", 0.0, member.failure))
            self._recover(member)

    def _recover(self, *members: Member) -> None:
        """Bring them back, as long as it may take. What they still have is of no use, or goes on elsewhere."""
        for member in members:
            if not self._closed and member.bringing is None:
                self._begin_bringing(member, "abort", _now() + self._patience)

    async def _stop_bringing(self) -> None:
        """Until nothing is under way; from then on, to the caller's next `await`, its replicas are its own."""
        while tasks := [m.bringing for m in self.members if m.bringing is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _none_serves(self) -> EngineFailed:
        failures = "; ".join(f"{m.replica.name}: {m.failure or m.sync.state}" for m in self.members)
        return EngineFailed(
            f"no replica serves version {self.target} ({failures})",
            "see the logs of the engine's servers and the journal of its syncs",
        )

    # --- health -----------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """What waits is counted here, and current; the rest is what was heard last."""

        def of(member: Member) -> EngineLoad:
            heard = member.replica.heard
            return msgspec.structs.replace(heard, waiting=max(0, len(member.requests) - heard.slots))

        return total(of(m) for m in self.members if m.sync.state != "out")

    async def look(self, hung: float) -> None:
        """Ask every replica for its load once. One that ended, or that has computed nothing for `hung` seconds while it
        had requests and was not paused, is lost: a server may answer that it is well when its scheduler is dead.
        """

        async def one(member: Member) -> None:
            if member.sync.state != "serving":
                member.heard = (member.heard[0], _now())
                return
            try:
                if not member.replica.alive():
                    raise ReplicaError("its process ended")
                await member.replica.load()
            except ReplicaError as error:
                if not member.replica.alive():
                    self.lost(member, error)
                elif _now() - member.heard[1] > hung:
                    self._hangs(member, error)
                return
            done = member.replica.computed
            if done != member.heard[0] or not member.requests:
                member.heard = (done, _now())
            elif _now() - member.heard[1] > hung:
                self._hangs(member, ReplicaError(f"it has computed nothing for {hung:g} s"))

        await asyncio.gather(*map(one, self.members))

    def _hangs(self, member: Member, error: ReplicaError) -> None:
        if member.sync.state == "serving" and member.sync.active is None:
            member.replica.kill()
            member.give_up()
            self.lost(member, error)

    async def close(self) -> None:
        """Bring nobody back any more, and end every replica."""
        self._closed = True
        self._changed.set()
        await self._stop_bringing()
        await asyncio.gather(*(m.replica.close() for m in self.members), return_exceptions=True)


def _now() -> float:
    """Of the event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


def said(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it did not answer in time"
    return str(error) or type(error).__name__


def total(loads: Iterable[EngineLoad]) -> EngineLoad:
    """The load of replicas together; of the KV cache the fullest one's."""
    every = list(loads)
    return EngineLoad(
        sum(x.running for x in every),
        sum(x.waiting for x in every),
        sum(x.slots for x in every),
        max((x.kv_used for x in every), default=0.0),
        sum(x.retractions for x in every),
    )
