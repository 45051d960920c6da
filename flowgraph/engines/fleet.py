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
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
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
from flowgraph.engines.rotation import Member, Rotation
from flowgraph.engines.segments import cut, ended, joined, narrowed, with_budget
from flowgraph.engines.sync import Journal, ReplicaError
from flowgraph.errors import EngineFailed

T = TypeVar("T")

GRACE = 2.0  # seconds until an aborted request is let go without its answer
TRIES = 5  # times that a request is sent before its engine is said to fail


class _Request:
    """One `generate` call. so_far: what its finished segments have; oldest: version that it may be sampled from."""

    def __init__(self, oldest: int) -> None:
        self.so_far = nothing()
        self.oldest = oldest
        self.aborted = False
        self.let_go = asyncio.Event()
        self.at: tuple[Member, str] | None = None


class Fleet:
    """Implements `flowgraph.engines.protocol.Engine`.

    stage, initial, patience, slack: see `rotation.Rotation`
    context: most tokens of a prompt and its response
    vocabulary: tokens of the model; None: whatever id is in a prompt is sent
    completed: whether a response holds a stop string, and where it ends
    close: frees what stage keeps
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
        self.rotation = Rotation(
            replicas, stage=stage, initial=initial, journal=journal, patience=patience, slack=slack
        )
        self._context, self._vocabulary, self._completed = context, vocabulary, completed
        self._close = close
        self._requests: dict[str, _Request] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def members(self) -> list[Member]:
        return self.rotation.members

    @property
    def version(self) -> int:
        return self.rotation.version

    async def start(self, *, fresh: bool) -> None:
        """Start every replica, side by side. fresh: they have just loaded version 0; else it is brought to them.

        Raises EngineFailed, with every process ended, unless all of them serve.
        """
        try:
            await self.rotation.start(fresh=fresh)
        except BaseException:
            await self.close()
            raise

    # --- requests ---------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: npt.NDArray[np.int32], sampling: Sampling, *, key: int, rid: str
    ) -> Generation:
        """Raises ValueError also for a rid in use, and for what the replica refuses of the request."""
        prompt = self._ids(rid, prompt)
        key = int(key)
        if not 0 <= key < 1 << 64:
            raise ValueError(f"{rid}: a key has 64 bits and no sign, unlike {key}")
        if rid in self._requests:
            raise ValueError(f"{rid}: a request of this name is under way")
        room = self._context - len(prompt)
        if room < 1:
            return nothing("context")
        clamped = with_budget(sampling, min(room, sampling.max_new_tokens))
        request = self._requests[rid] = _Request(self.rotation.target)
        try:
            out = await self._whole(request, prompt, clamped, key, rid)
        finally:
            del self._requests[rid]
        if out.finish_reason == "length" and len(out.ids) < sampling.max_new_tokens:
            return ended(out, "context")
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
        like = blake2b(prompt.tobytes(), digest_size=16).digest()
        while not request.aborted:
            have = request.so_far
            member = await self.rotation.choose(like, lambda: request.aborted)
            if member is None:
                break
            name = uuid.uuid4().hex
            member.requests.add(name)
            request.at, request.oldest = (member, name), self.rotation.target
            try:
                segment = await _unless(
                    (member.given_up, request.let_go),
                    member.replica.generate(
                        np.concatenate([prompt, have.ids]),
                        with_budget(sampling, sampling.max_new_tokens - len(have.ids)),
                        key=key,
                        drawn=len(have.ids),
                        rid=name,
                        recorded=min((one.start for one in have.side.values()), default=0),
                    ),
                )
                if len(segment.ids) and segment.versions.min() < min(request.oldest, self.rotation.target):
                    text = f"it sampled from version {segment.versions.min()} after it had {request.oldest}"
                    raise ReplicaError(text)  # somebody else started it anew
            except ReplicaError as error:
                if request.let_go.is_set():
                    break
                tries += 1
                self._soon(member.replica.abort(name))
                self.rotation.lost(member, error)
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
                    return cut(request.so_far, end)
            if segment.finish_reason != "abort":
                return request.so_far
            # Nothing, and not for a sync's sake: whoever aborts it may do so for ever.
            tries += not len(segment.ids) and member.sync.serves(self.rotation.target)
            if tries == TRIES and not request.aborted:
                raise EngineFailed(
                    f"{rid}: somebody aborts it, {tries} times", "see who else uses the servers"
                )
            if len(request.so_far.ids) == sampling.max_new_tokens:  # aborted after its last token
                return ended(request.so_far, "length")
            request.so_far = narrowed(request.so_far)
        return ended(request.so_far, "abort")

    def abort(self, rid: str) -> bool:
        request = self._requests.get(rid)
        if request is None:
            return False
        request.aborted = True
        if request.at is not None:
            self._soon(self._end(request, *request.at))
        self.rotation.wake()
        return True

    async def _end(self, request: _Request, member: Member, name: str) -> None:
        """Abort what a replica has of a request. SGLang answers yes, and does nothing, for one that it was sent while
        it was paused: such a request is let go, and its connection closed.
        """
        with suppress(ReplicaError):
            await member.replica.abort(name)
        await asyncio.sleep(GRACE)
        request.let_go.set()

    async def logprobs(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        tokens = self._ids("log-probabilities", tokens)
        if len(tokens) > self._context:
            raise ValueError(f"log-probabilities: {len(tokens)} tokens exceed the context of {self._context}")
        for _ in range(TRIES):
            member = await self.rotation.choose(None, lambda: False)
            assert member is not None
            name = uuid.uuid4().hex
            member.requests.add(name)
            try:
                return await _unless((member.given_up,), member.replica.logprobs(tokens))
            except ReplicaError as error:
                self.rotation.lost(member, error)
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
        return await self.rotation.sync(weights, version, pause=pause, seconds=seconds)

    # --- health -----------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        return self.rotation.load()

    async def look(self, hung: float) -> None:
        """Ask every replica for its load now; see `Rotation.look`."""
        await self.rotation.look(hung)

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
        for rid in list(self._requests):
            self.abort(rid)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.rotation.close()
        self._close()


async def _unless(over: Sequence[asyncio.Event], call: Coroutine[Any, Any, T]) -> T:
    """What a call gives, unless one of the events comes before; then ReplicaError."""
    ours, theirs = asyncio.ensure_future(call), [asyncio.ensure_future(event.wait()) for event in over]
    try:
        await asyncio.wait([ours, *theirs], return_when=asyncio.FIRST_COMPLETED)
        if ours.done():
            return ours.result()
        raise ReplicaError("it was given up")
    finally:
        for task in (ours, *theirs):
            if not task.done():
                task.cancel()
