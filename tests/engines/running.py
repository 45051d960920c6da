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
SLOTS = 16  # of each replica
NEAR = 1e-3  # between log-probabilities of two implementations in float32; SGLang's are within 3e-5
PATIENCE = 300.0
LIMIT = 240.0  # seconds for one step of a test


class Running:
    """kind: of the weights that it serves. seen: called with each line of the journal, on the event loop."""

    def __init__(self, name: str, options: EngineOptions, model: ServedModel, logs: Path) -> None:
        self.name, self.model, self.kind = name, model, "base"
        self.seen: Callable[[Entry], None] = lambda entry: None
        self.shared_memory = _named()
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

    async def running(self, count: int) -> None:
        """Until so many requests are being decoded."""
        await self.until(lambda load: load.running >= count)

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
            self.do(self.engine.close())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def left(self) -> set[str]:
        """Names in /dev/shm that were not there before, and that no living process holds."""
        held = _held()
        new = set(_named()) - set(self.shared_memory)
        return {name for name, inode in _named().items() if name in new and inode not in held}


def _named() -> dict[str, int]:
    """What is in /dev/shm: name → inode."""
    return {file.name: file.inode() for file in os.scandir("/dev/shm")}


def _held() -> set[int]:
    """Inodes of /dev/shm that a living process has mapped or opened: others on this machine, here."""
    held: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mapped = (process / "maps").read_text().splitlines()
            opened = [fd for fd in (process / "fd").iterdir() if "/dev/shm/" in os.readlink(fd)]
            held |= {fd.stat().st_ino for fd in opened}
        except OSError:
            continue
        held |= {int(line.split()[4]) for line in mapped if " /dev/shm/" in line}
    return held
