"""An engine as its owner's worker has it: started by `start_engine`, with an event loop of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from served_model import CONTEXT, Floats, Ids, ServedModel

from flowgraph.engines.fleet import Fleet
from flowgraph.engines.protocol import EngineLoad, Generation, PauseMode, Sampling, Synced
from flowgraph.engines.registry import EngineOptions, start_engine
from flowgraph.engines.sync import Entry

T = TypeVar("T")
Task = asyncio.Future[Generation]
SLOTS = 16  # of each replica
NEAR = 1e-3  # between log-probabilities of two implementations in float32; SGLang's are within 3e-5
PATIENCE = 300.0
LIMIT = 240.0  # seconds for one step of a test


class Running:
    """kind: of the weights that it serves. seen: called with each line of the journal, on the event loop."""

    def __init__(self, name: str, options: EngineOptions, model: ServedModel, logs: Path) -> None:
        self.name, self.model, self.kind = name, model, "base"
        self.seen: Callable[[Entry], None] = lambda entry: None
        self.shared_memory: dict[str, int] = {}
        self.loop = asyncio.new_event_loop()
        self.closed = False
        starting = start_engine(
            options,
            str(model.directory),
            context=CONTEXT,
            threads=1,
            logs=str(logs),
            journal=lambda entry: self.seen(entry),
            patience=PATIENCE,
        )
        self.engine: Fleet = self.loop.run_until_complete(starting)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, LIMIT))

    # --- requests ---------------------------------------------------------------------------------------------

    def ask(
        self, prompt: Iterable[int] | Ids, new: int, *, key: int = 1, rid: str = "", **sampling: Any
    ) -> Coroutine[Any, Any, Generation]:
        ids = np.array(list(prompt), np.int32)
        how = Sampling(max_new_tokens=new, **sampling)
        return self.engine.generate(ids, how, key=key, rid=rid or os.urandom(8).hex())

    def answer(self, prompt: Iterable[int] | Ids, new: int, **more: Any) -> Generation:
        return self.do(self.ask(prompt, new, **more))

    def answers(self, asked: Iterable[Coroutine[Any, Any, Generation]]) -> list[Generation]:
        async def all_of_them() -> list[Generation]:
            return await asyncio.gather(*asked)

        return self.do(all_of_them())

    async def until(self, condition: Callable[[EngineLoad], bool], seconds: float = 60.0) -> EngineLoad:
        """The load, as soon as it is as wanted. Asked for now: by itself the engine looks every other second."""
        end = time.monotonic() + seconds
        while True:
            await self.engine.look(PATIENCE)
            load = self.engine.load()
            if condition(load):
                return load
            assert time.monotonic() < end, f"it was never so: {load}"
            await asyncio.sleep(0)

    async def begun(self, *asked: Callable[[], Coroutine[Any, Any, Generation]]) -> list[Task]:
        """These requests, at a moment when some are being decoded and none has ended.

        Asked again when that moment was missed: on a busy machine a server may be slow to tell its load.
        """
        for _ in range(5):
            tasks = [asyncio.ensure_future(ask()) for ask in asked]
            load = await self.until(
                lambda load, tasks=tasks: load.running > 0 or any(t.done() for t in tasks)
            )
            if load.running and not any(task.done() for task in tasks):
                return tasks
            await asyncio.gather(*tasks)
        raise AssertionError("the engine was never seen to decode them")

    # --- weights ----------------------------------------------------------------------------------------------

    async def sync(self, kind: str, pause: PauseMode = "retract") -> Synced:
        """To the next version, with weights of this kind."""
        self.kind = "unknown"
        done = await self.engine.sync(self.model.weights(kind), self.engine.version + 1, pause=pause)
        self.kind = kind
        return done

    def serve(self, kind: str) -> None:
        if self.kind != kind:
            self.do(self.sync(kind))

    # --- what is right ----------------------------------------------------------------------------------------

    def check(
        self, prompt: Iterable[int] | Ids, out: Generation, *, kind: str = "", temperature: float = 1.0
    ) -> None:
        """The parts of a response fit each other, and its log-probabilities are those of a teacher-forced forward."""
        self.fits(out)
        np.testing.assert_allclose(
            out.logprobs, self.forced(prompt, out, kind or self.kind, temperature), atol=NEAR, rtol=0
        )

    def fits(self, out: Generation) -> None:
        assert [str(a.dtype) for a in (out.ids, out.logprobs, out.versions)] == ["int32", "float32", "int32"]
        assert out.ids.shape == out.logprobs.shape == out.versions.shape == (len(out.ids),)
        assert np.isfinite(out.logprobs).all()

    def forced(
        self, prompt: Iterable[int] | Ids, out: Generation, kind: str, temperature: float = 1.0
    ) -> Floats:
        """f32[r]: of each token of the response, by plain transformers."""
        before = list(prompt)
        return self.model.logprobs(kind, [*before, *out.ids.tolist()], temperature)[len(before) :]

    # --- processes --------------------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Of the servers; none when the engine is in this process."""
        pids = [getattr(member.replica, "pid", 0) for member in self.engine.members]
        return [pid for pid in pids if pid]

    def close(self) -> None:
        """Harmless when repeated."""
        if not self.closed:
            self.closed = True
            self.shared_memory = _shared_memory(set(self.processes()))
            self.do(self.engine.close())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def left(self) -> list[str]:
        """What it had in /dev/shm when it was closed, and is still there."""
        now = {file.name: file.inode() for file in os.scandir("/dev/shm")}
        return [name for name, inode in self.shared_memory.items() if now.get(name) == inode]


def _shared_memory(sessions: set[int]) -> dict[str, int]:
    """Files in /dev/shm that processes of these sessions have mapped or opened: name → inode.

    By inode, because a named semaphore is mapped under another name than it has.
    """
    held: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) in sessions:
                mapped = (process / "maps").read_text().splitlines()
                held |= {int(line.split()[4]) for line in mapped if " /dev/shm/" in line}
                opened = (fd for fd in (process / "fd").iterdir() if "/dev/shm/" in os.readlink(fd))
                held |= {fd.stat().st_ino for fd in opened}
        except OSError:
            continue
    return {file.name: file.inode() for file in os.scandir("/dev/shm") if file.inode() in held}
