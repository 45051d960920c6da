"""An engine over replicas: which of them serves a request, and what becomes of it when that one stops.

Life of a request:

1. It waits until a replica is in rotation, which is one that serves the newest version.
2. The one with the fewest requests takes it, or the one that has its prompt cached, while that is not much busier.
3. When the replica is paused with `abort`, what was sampled so far comes back. It is the prefix of the next segment;
   ids, log-probabilities and versions are joined, and the random numbers go on where they were.
4. When a replica dies, or its connection is cut, nothing that it had sampled is known. The request goes out anew under
   another name, with the same key; the old one is aborted, should it still be under way somewhere.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flowgraph.engines.protocol import (
    EngineLoad,
    Generation,
    PauseMode,
    Replica,
    Sampling,
    Synced,
    nothing,
)
from flowgraph.engines.served.side import joined as joined_side
from flowgraph.engines.sync import Brought, Entry, Journal, ReplicaError, Sync, bring
from flowgraph.errors import EngineFailed

T = TypeVar("T")

AFFINE = 4096  # prompts whose replica is remembered
FAILURES = (ReplicaError, TimeoutError)  # of a replica; any other is a fault of what it was asked
TRIES = 5  # times that a request is sent before its engine is said to fail


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


class _Request:
    """One `generate` call. so_far: what its finished segments have; oldest: version that it may be sampled from."""

    def __init__(self, oldest: int) -> None:
        self.so_far = nothing()
        self.oldest = oldest
        self.aborted = False
        self.at: tuple[Member, str] | None = None


class Fleet:
    """Implements `flowgraph.engines.protocol.Engine`.

    stage: takes the weights of a version once, and gives what every replica's `update` is handed; it stays valid until
        the next call, so that a replica that is replaced later gets them too
    initial: the same for version 0, the model's own files
    context: most tokens of a prompt and its response
    vocabulary: tokens of the model; None: whatever id is in a prompt is sent
    completed: whether a response holds a stop string, and where it ends
    patience: seconds that a request may wait for a replica, and that a replica may take to be brought back
    close: frees what stage keeps
    slack: how many more requests the replica that has a prompt cached may have than the least loaded one
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        context: int,
        vocabulary: int | None = None,
        stage: Callable[[Mapping[str, Any], int], Any],
        initial: Any,
        completed: Callable[[Sequence[int], tuple[str, ...]], int | None],
        journal: Journal = lambda entry: None,
        patience: float = 600.0,
        slack: int = 4,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        assert replicas
        self._close = close
        self.members = [Member(replica) for replica in replicas]
        self._context, self._stage, self._staged = context, stage, initial
        self._completed, self._journal, self._vocabulary = completed, journal, vocabulary
        self._patience, self._slack = patience, slack
        self._version = self._target = 0
        self._requests: dict[str, _Request] = {}
        self._affine: OrderedDict[bytes, Member] = OrderedDict()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._syncing = False
        self._closed = False

    @property
    def version(self) -> int:
        return self._version

    async def start(self, *, fresh: bool) -> None:
        """Start every replica, side by side. fresh: they have just loaded version 0; else it is brought to them.

        Raises EngineFailed, with every process ended, unless all of them serve.
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

        try:
            problems = await asyncio.gather(*map(one, self.members), return_exceptions=True)
        except BaseException:  # whoever starts us does not want us any more
            await self.close()
            raise
        for member, problem in zip(self.members, problems, strict=True):
            if problem is not None:
                await self.close()
                if isinstance(problem, FAILURES):
                    raise EngineFailed(
                        f"replica {member.replica.name} did not start: {said(problem)}",
                        "see the end of its log, or run flowgraph doctor",
                    ) from problem
                raise problem

    # --- requests ---------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: npt.NDArray[np.int32], sampling: Sampling, *, key: int, rid: str
    ) -> Generation:
        """Raises ValueError also for a rid in use, and for what the replica refuses of the request."""
        prompt = self._ids(rid, prompt)
        if not 0 <= key < 1 << 64:
            raise ValueError(f"{rid}: a key has 64 bits and no sign, unlike {key}")
        if rid in self._requests:
            raise ValueError(f"{rid}: a request of this name is under way")
        room = self._context - len(prompt)
        if room < 1:
            return nothing("context")
        clamped = _with_budget(sampling, min(room, sampling.max_new_tokens))
        request = self._requests[rid] = _Request(self._target)
        try:
            out = await self._whole(request, prompt, clamped, key, rid)
        finally:
            del self._requests[rid]
        if out.finish_reason == "length" and len(out.ids) < sampling.max_new_tokens:
            return _ended(out, "context")
        return out

    def _ids(self, said: str, ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """i32[n], as given; ValueError for what is no row of tokens. SGLang 0.5.23 ends by an id below 0, and makes up
        an embedding for one that is too large.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise ValueError(f"{said}: a prompt is a non-empty row of ids, not {ids.dtype} {ids.shape}")
        if self._vocabulary is not None:
            wrong = np.flatnonzero((ids < 0) | (ids >= self._vocabulary))
            if len(wrong):
                text = f"{said}: the prompt holds {ids[wrong[0]]} at position {wrong[0]}"
                raise ValueError(f"{text}, outside the vocabulary of {self._vocabulary}")
        return ids.astype(np.int32)

    async def _whole(
        self, request: _Request, prompt: npt.NDArray[np.int32], sampling: Sampling, key: int, rid: str
    ) -> Generation:
        """Segment after segment, until one ends by itself or the request is aborted."""
        tries = 0
        while not request.aborted:
            have = request.so_far
            member = await self._choose(prompt, request)
            if member is None:
                break
            name = uuid.uuid4().hex
            member.requests.add(name)
            request.at, request.oldest = (member, name), self._target
            try:
                segment = await _unless(
                    member.given_up,
                    member.replica.generate(
                        np.concatenate([prompt, have.ids]),
                        _with_budget(sampling, sampling.max_new_tokens - len(have.ids)),
                        key=key,
                        drawn=len(have.ids),
                        rid=name,
                        recorded=min((one.start for one in have.side.values()), default=0),
                    ),
                )
                if len(segment.ids) and segment.versions.min() < request.oldest:
                    text = f"it sampled from version {segment.versions.min()} after it had {request.oldest}"
                    raise ReplicaError(text)  # somebody else started it anew
            except ReplicaError as error:
                tries += 1
                self._lost(member, error, name)
                if tries == TRIES:
                    text = f"{rid}: the engine failed {tries} times, the last time so: {error}"
                    raise EngineFailed(text, "see the logs of the engine's servers") from error
                continue
            except BaseException:  # the caller is gone, or the request is at fault
                self._soon(member.replica.abort(name))
                raise
            finally:
                request.at = None
                member.requests.discard(name)
            request.so_far = joined(have, segment, rid)
            # A stop string may have begun in an earlier segment. And SGLang looks back as many tokens as its tokenizer
            # makes of the string: it misses one that the model spelled in more.
            if sampling.stop:
                end = self._completed(request.so_far.ids.tolist(), sampling.stop)
                if end is not None:
                    return _cut(request.so_far, end)
            if segment.finish_reason != "abort":
                return request.so_far
            if len(request.so_far.ids) == sampling.max_new_tokens:  # aborted after its last token
                return _ended(request.so_far, "length")
        return _ended(request.so_far, "abort")

    async def _choose(self, prompt: npt.NDArray[np.int32], request: _Request) -> Member | None:
        """A replica in rotation, waited for; None when the request is aborted meanwhile."""
        until = _now() + self._patience
        while not request.aborted:
            if self._closed:
                raise RuntimeError("the engine is closed")
            ready = [m for m in self.members if m.sync.serves(self._target)]
            if ready:
                return self._prefer(ready, prompt.tobytes())
            hopeless = not self._syncing and not any(m.bringing for m in self.members)
            if hopeless or _now() >= until:
                raise self._none_serves()
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
        return None

    def _prefer(self, ready: list[Member], prompt: bytes) -> Member:
        least = min(ready, key=lambda m: len(m.requests))
        known = self._affine.get(prompt)
        if known in ready and len(known.requests) <= len(least.requests) + self._slack:
            least = known
        self._affine[prompt] = least
        self._affine.move_to_end(prompt)
        if len(self._affine) > AFFINE:
            self._affine.popitem(last=False)
        return least

    def abort(self, rid: str) -> bool:
        request = self._requests.get(rid)
        if request is None:
            return False
        request.aborted = True
        if request.at is not None:
            member, name = request.at
            self._soon(member.replica.abort(name))
        self._changed.set()
        return True

    async def logprobs(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        tokens = self._ids("log-probabilities", tokens)
        if len(tokens) > self._context:
            raise ValueError(f"log-probabilities: {len(tokens)} tokens exceed the context of {self._context}")
        request = _Request(self._target)
        for _ in range(TRIES):
            member = await self._choose(tokens, request)
            assert member is not None
            name = uuid.uuid4().hex
            member.requests.add(name)
            try:
                return await _unless(member.given_up, member.replica.logprobs(tokens))
            except ReplicaError as error:
                self._lost(member, error, "")
                failed = error
            finally:
                member.requests.discard(name)
        raise EngineFailed(f"log-probabilities, asked for {TRIES} times: {failed}", "see the servers' logs")

    # --- weights ----------------------------------------------------------------------------------------------

    async def sync(
        self,
        weights: Mapping[str, Any],
        version: int,
        *,
        pause: PauseMode = "retract",
        seconds: float = 300.0,
    ) -> Synced:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._syncing:
            raise RuntimeError(f"a sync to version {self._target} is under way")
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
        self._version = version
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
            self._staged = self._stage(weights, version)
        except ValueError:
            self._recover(*(m for m in self.members if m.sync.state == "out"))
            raise
        self._target = version
        for request in self._requests.values():
            request.oldest = min(request.oldest, version)

    async def _until_one_serves(self, until: float) -> None:
        """Or until there is no hope, or no time."""
        while not any(m.sync.serves(self._target) for m in self.members):
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
                self._target,
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

    def _lost(self, member: Member, error: Exception, name: str) -> None:
        """A replica did not answer: out of rotation with it, and bring it back, unless that is under way."""
        if name:
            self._soon(member.replica.abort(name))
        if member.sync.state == "serving" and member.sync.active is None:
            member.failure = said(error)
            member.sync.failed()
            where = member.replica.name
            self._journal(Entry(time.time(), where, self._target, 0, "serve", "failed", 0.0, member.failure))
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
            f"no replica serves version {self._target} ({failures})",
            "see the logs of the engine's servers and the journal of its syncs",
        )

    # --- health -----------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        return total(m.replica.heard for m in self.members if m.sync.state != "out")

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
                    self._lost(member, error, "")
                elif _now() - member.heard[1] > hung:
                    self._hangs(member, error)
                return
            done = progress(member.replica)
            if done != member.heard[0] or not member.requests:
                member.heard = (done, _now())
            elif _now() - member.heard[1] > hung:
                self._hangs(member, ReplicaError(f"it has computed nothing for {hung:g} s"))

        await asyncio.gather(*map(one, self.members))

    def _hangs(self, member: Member, error: ReplicaError) -> None:
        if member.sync.state == "serving" and member.sync.active is None:
            member.replica.kill()
            member.give_up()
            self._lost(member, error, "")

    def watch(self, every: float, hung: float) -> None:
        """Look at every replica, again and again, until the engine is closed."""

        async def run() -> None:
            while True:
                await asyncio.sleep(every)
                await self.look(hung)

        self._soon(run())

    # --- end --------------------------------------------------------------------------------------------------

    def _soon(self, what: Any) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ReplicaError):
            raise error

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        for rid in list(self._requests):
            self.abort(rid)
        await self._stop_bringing()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(m.replica.close() for m in self.members), return_exceptions=True)
        self._close()


async def _unless(given_up: asyncio.Event, call: Coroutine[Any, Any, T]) -> T:
    """What a call gives, unless its replica is given up before; then ReplicaError."""
    ours, theirs = asyncio.ensure_future(call), asyncio.ensure_future(given_up.wait())
    try:
        await asyncio.wait({ours, theirs}, return_when=asyncio.FIRST_COMPLETED)
        if ours.done():
            return ours.result()
        raise ReplicaError("it was given up")
    finally:
        for task in (ours, theirs):
            if not task.done():
                task.cancel()


def _now() -> float:
    """Of the event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


def said(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it did not answer in time"
    return str(error) or type(error).__name__


def progress(replica: Replica) -> float:
    """A number that grows while a replica computes."""
    return float(getattr(replica, "computed", 0.0))


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


# --- segments --------------------------------------------------------------------------------------------------


def joined(first: Generation, second: Generation, rid: str) -> Generation:
    """Two segments of one response; what ended the second ends both."""
    if not len(first.ids):
        return second
    side = {
        name: joined_side(one, second.side[name], rid=rid) if name in second.side else one
        for name, one in first.side.items()
    }
    return Generation(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.logprobs, second.logprobs]),
        np.concatenate([first.versions, second.versions]),
        second.finish_reason,
        first.retractions + second.retractions,
        side,
    )


def _cut(whole: Generation, end: int) -> Generation:
    """Its first `end` tokens, of which the last completes a stop string."""
    return Generation(
        whole.ids[:end], whole.logprobs[:end], whole.versions[:end], "stop", whole.retractions, whole.side
    )


def _ended(whole: Generation, reason: Any) -> Generation:
    return Generation(whole.ids, whole.logprobs, whole.versions, reason, whole.retractions, whole.side)


def _with_budget(sampling: Sampling, tokens: int) -> Sampling:
    return Sampling(tokens, sampling.temperature, sampling.stop, sampling.record)
