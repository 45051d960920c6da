"""A rollout server in a few lines, under virtual time: `HttpReplica`, `bring` and `Fleet` run as they are over it.

It is as strict as SGLang with a memory saver on a GPU, where a wrong order ends the server: what a caller must never do
is written to `World.violations`. Tokens are a function of key and position, log-probabilities also of the version.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import numpy as np

from flowgraph.engines.fleet import Fleet
from flowgraph.engines.served.client import Cut, Refused
from flowgraph.engines.served.process import ServerProcess
from flowgraph.engines.served.replica import HttpReplica
from flowgraph.engines.served.transports import FromDisk
from flowgraph.engines.served.verify import same_version
from flowgraph.engines.sync import Entry

T = TypeVar("T")
TOKEN = 0.1  # seconds that a token takes
LOAD = 0.5  # an update
START = 3.0  # a start
RESTART = 5.0  # until somebody restarts a server that is not ours

PATHS = {
    "pause": "/pause_generation",
    "release": "/release_memory_occupation",
    "update": "/update_weights_from_disk",
    "resume": "/resume_memory_occupation",
    "continue": "/continue_generation",
}
# before: the server does not get it. after: it does, but its answer is lost. inside: while it is at it. hang: it stops
# there and then. error: it says no. half: an update leaves half of the weights, and says no.
FAULTS = (
    "cut before",
    "cut after",
    "cut inside",
    "kill before",
    "kill after",
    "kill inside",
    "hang",
    "error",
    "half",
)


class Fault(msgspec.Struct, frozen=True):
    """What goes wrong when a path is asked for the (after + 1)-th time."""

    path: str
    kind: str
    after: int = 0


class _Clock(selectors.SelectSelector):
    """Never waits: time is where the next timer is."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "every task waits, and nothing will ever happen"
        self.now += max(0.0, timeout)
        return super().select(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, in no time. Also fails for a task that is left behind, and for an error that nobody sees."""
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    unseen: list[Any] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    left: set[asyncio.Task[Any]] = set()
    try:
        result = loop.run_until_complete(main)
        left = asyncio.all_tasks(loop)
    finally:
        for task in (every := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.wait(every) if every else asyncio.sleep(0))
        loop.close()
    assert not left, left
    assert not unseen, unseen
    return result


def token(key: int, position: int) -> int:
    return (key * 31 + position * 7) % 97


def logprob(id: int, version: int) -> float:
    return -version - id / 128  # a float32


class World:
    """The servers by address, and what is to go wrong.

    owned: for each server whether it is ours; violations: what some server should never have seen
    """

    def __init__(self, owned: tuple[bool, ...], *, patience: float = 120.0) -> None:
        self.violations: list[str] = []
        self.faults: list[Fault] = []
        self.happened: list[Fault] = []
        self.seen: dict[str, int] = {}
        self.journal: list[Entry] = []
        self.asked: list[str] = []  # request names, as servers got them
        self.servers: dict[str, Server] = {}
        self.processes: list[Process] = []
        self.over = False
        self.anew = "default"  # the version that a restarted server of others names
        replicas = [self._replica(at, ours) for at, ours in enumerate(owned)]
        self.fleet = Fleet(
            replicas,
            context=200,
            stage=lambda weights, version: SimpleNamespace(directory="", nbytes=1, version=version),
            initial=SimpleNamespace(directory="", nbytes=1, version=0),
            completed=lambda ids, stop: None,
            journal=self.journal.append,
            patience=patience,
        )
        self.fresh = all(owned)

    def _replica(self, at: int, ours: bool) -> HttpReplica:
        def connect(url: str) -> Any:
            return Connections(self, url)

        if ours:
            process = Process(self, at)
            self.processes.append(process)
            return HttpReplica(
                f"ours {at}",
                FromDisk(),
                process=process,
                saver=True,
                verify=same_version,
                connect=connect,
            )
        url = f"http://theirs:{at}"
        self.servers[url] = Server(self, url, version="default", ready=0.0)
        return HttpReplica(f"theirs {at}", FromDisk(), url=url, verify=same_version, connect=connect)

    async def start(self) -> Fleet:
        await self.fleet.start(fresh=self.fresh)
        self.fleet.watch(2.0, 15.0)
        return self.fleet

    async def end(self) -> None:
        """Close the engine; nothing of it is left, and no server saw what it never should."""
        self.over = True
        await self.fleet.close()
        assert not [p for p in self.processes if p.alive()]
        for server in self.servers.values():
            server.die()
        await asyncio.sleep(1.0)  # what was cancelled ends
        assert self.violations == []

    def fault(self, path: str) -> str:
        """What goes wrong with this call, if anything."""
        path = path.partition("?")[0]
        count = self.seen[path] = self.seen.get(path, -1) + 1
        for fault in self.faults:
            if fault.path == path and count >= fault.after:
                self.faults.remove(fault)
                self.happened.append(fault)
                return fault.kind
        return ""

    def heal(self) -> None:
        """Nothing goes wrong from here on, and servers of others that stopped go on."""
        self.faults.clear()
        for server in self.servers.values():
            server.stopped = False
            server.change()


class Server:
    """One incarnation. weights: the version that it holds, None for parts of two"""

    def __init__(self, world: World, url: str, *, version: str, ready: float) -> None:
        self.world, self.url = world, url
        self.ready = asyncio_now() + ready
        self.weights: str | None = version
        self.paused = self.released = self.stopped = False
        self.mode = ""
        self.requests: dict[str, bool] = {}  # name → whether it is to end
        self.lock = asyncio.Lock()
        self.died = asyncio.Event()
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.tokens = 0

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.world.violations.append(f"{self.url}: {what}")

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, state: Callable[[], bool]) -> None:
        while self.stopped or not state():
            await self.changed.wait()

    def die(self) -> None:
        self.died.set()
        for task in self.tasks:
            task.cancel()

    def take(self, path: str, body: Any, fault: str) -> asyncio.Task[Any]:
        """Its work on a call, which goes on when the caller is gone."""
        path = path.partition("?")[0]
        task = asyncio.ensure_future(self._answer(path, body or {}, fault))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _answer(self, path: str, body: Any, fault: str) -> Any:
        await asyncio.sleep(0.01)
        await self.until(lambda: True)
        if path in PATHS.values():
            async with self.lock:
                await getattr(self, "_" + next(a for a, p in PATHS.items() if p == path))(body, fault)
            return {}
        if path == "/generate":
            return await self._generate(body)
        if path == "/abort_request":
            if body["rid"] in self.requests:
                self.requests[body["rid"]] = True
                self.change()
            return {}
        if path == "/v1/loads":
            return {"loads": [{"decode_moments": [self.tokens]}]}
        assert path in ("/model_info", "/server_info")
        return {"weight_version": self.weights}

    async def _pause(self, body: Any, fault: str) -> None:
        self.paused, self.mode = True, body["mode"]
        if self.mode == "abort":
            self.requests = dict.fromkeys(self.requests, True)
        self.change()

    async def _release(self, body: Any, fault: str) -> None:
        self.check(self.paused and self.mode != "in_place", "released while a request ran")
        self.check(not self.released, "released twice")
        self.released = True

    async def _update(self, body: Any, fault: str) -> None:
        self.check(self.paused, "weights changed while it computed")
        self.weights = None
        await asyncio.sleep(LOAD / 2)
        await self.until(lambda: True)
        if fault == "half":
            raise Refused(self.url, 400, "the other half is missing")
        await asyncio.sleep(LOAD / 2)
        await self.until(lambda: True)
        self.weights = body["weight_version"]

    async def _resume(self, body: Any, fault: str) -> None:
        self.check(self.released, "resumed without a release")
        self.released = False

    async def _continue(self, body: Any, fault: str) -> None:
        self.check(not self.released, "went on without memory")
        self.check(self.weights is not None, "went on with half of the weights")
        self.paused = False
        self.change()

    async def _generate(self, body: Any) -> Any:
        rid, prompt, drawn = body["rid"], body["input_ids"], body["drawn"]
        key, budget = body["sampling_params"]["sampling_seed"], body["sampling_params"]["max_new_tokens"]
        self.world.asked.append(rid)
        self.check(rid not in self.requests, "a request that it has was sent again")
        said = [token(key, at) for at in range(drawn)]
        self.check(prompt[len(prompt) - drawn :] == said, "a resumed request does not end with its tokens")
        self.requests[rid] = False
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        values: list[Any] = []
        while len(ids) < budget:
            await asyncio.sleep(TOKEN)
            await self.until(lambda: not self.paused or self.requests[rid])
            if self.requests[rid]:
                break
            self.check(not self.released, "computed without memory")
            self.check(self.weights is not None, "computed with half of the weights")
            ids.append(token(key, drawn + len(ids)))
            version = str(self.weights)
            values.append([logprob(ids[-1], int(version) if version.isdecimal() else 0), ids[-1], None])
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": len(ids) - 1, "end": len(ids)})
            spans[-1]["end"] = len(ids)
            self.tokens += 1
        await asyncio.sleep(0.01)
        await self.until(lambda: True)
        reason = "abort" if self.requests.pop(rid) else "length"  # also one that had its last token
        meta = {
            "id": rid,
            "finish_reason": {"type": reason},
            "weight_versions": spans,
            "output_token_logprobs": values,
        }
        return {"output_ids": ids, "meta_info": meta}


class Connections:
    """In place of `served.client.Client`."""

    def __init__(self, world: World, url: str) -> None:
        self.world, self.url = world, url
        self.closed = asyncio.Event()

    async def ask(self, path: str, body: Any = None, *, seconds: float, form: Any = Any) -> Any:
        where = self.url + path
        server = self.world.servers.get(self.url)
        fault = self.world.fault(path)
        if self.closed.is_set() or server is None or server.died.is_set() or server.ready > asyncio_now():
            await asyncio.sleep(0.001)
            raise Cut(f"{where} refused")
        if fault == "error":
            raise Refused(where, 500, "not today")
        if fault == "kill before":
            self._kill(server)
        if fault in ("cut before", "kill before"):
            raise Cut(where)
        if fault == "hang":
            server.stopped = True
        work = server.take(path, body, fault)
        died, closed = (asyncio.ensure_future(e.wait()) for e in (server.died, self.closed))
        try:
            await asyncio.wait(
                {work, died, closed},
                timeout=LOAD / 4 if "inside" in fault else seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if fault in ("kill after", "kill inside"):
                self._kill(server)
            if fault.startswith(("cut", "kill")) or not work.done() or work.cancelled():
                raise Cut(f"{where}: {fault or 'no answer'}")
            return msgspec.convert(work.result(), form) if form is not None else work.result()
        finally:
            died.cancel()
            closed.cancel()
            work.add_done_callback(lambda w: w.cancelled() or w.exception())

    def _kill(self, server: Server) -> None:
        server.die()
        if self.url.startswith("http://theirs") and not self.world.over:
            self.world.servers[self.url] = Server(
                self.world, self.url, version=self.world.anew, ready=RESTART
            )

    async def close(self) -> None:
        self.closed.set()


class Process(ServerProcess):
    """A server of ours: what `ServerProcess` does with a real one."""

    def __init__(self, world: World, at: int) -> None:
        super().__init__("python", lambda port: (), variables={}, log=Path())
        self.world, self.at = world, at
        self.server: Server | None = None
        self.port = 10000 * (at + 1)

    def launch(self) -> None:
        assert not self.world.over, "started after the end"
        self.end()
        self.port += 1
        url = f"http://127.0.0.1:{self.port}"
        self.server = self.world.servers[url] = Server(self.world, url, version="0", ready=START)

    def alive(self) -> bool:
        return self.server is not None and not self.server.died.is_set()

    def ended(self) -> str:
        return "its process ended"

    def end(self) -> None:
        if self.server is not None:
            self.server.die()
            self.server = None


def asyncio_now() -> float:
    return asyncio.get_running_loop().time()


def prompt(row: int) -> np.ndarray[Any, Any]:
    return np.array([200 + row, 1, 2], np.int32)
