"""Where workers live: in this process (`inproc`, deterministic, for debugging) or one process an owner (`processes`).

Both speak the same messages with the same Worker, so a graph gives equal outputs on each.
"""

from __future__ import annotations

import asyncio
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from flowgraph.errors import DeadlineError, RunError, WorkerDied
from flowgraph.plan.plan import Plan, to_json
from flowgraph.runtime.channel import HEAD, Channel
from flowgraph.runtime.messages import FromWorker, Setup, Stop, ToWorker, decode_from_worker, encode
from flowgraph.runtime.seats import Seat, maps, seats
from flowgraph.runtime.transport import Shared, Transport
from flowgraph.runtime.worker import Worker, failed

# What most likely stands behind a signal, and what to do. Whoever sends one says nothing.
MEMORY = (
    "most likely the kernel, for want of memory: lower dims.group or the engine's slots, or allow it more; "
)
SIGNALS: dict[int, str] = {
    signal.SIGKILL: MEMORY,
    signal.SIGTERM: "someone ended it, or the machine is shutting down: start the run again; ",
    signal.SIGSEGV: "a native library failed, or a hop wrote to what it reads: --executor inproc shows which; ",
    signal.SIGBUS: MEMORY,
}
# Seconds that the driver looks for an answer before it sleeps: where a core is idle, to be woken takes as long as what
# it waits for. With it a firing that does nothing is there and back in 95 us, without it in 150 us.
AWAKE = 200e-6
# Seconds that a worker on the driver's own event loop has to end.
ENDING = 10.0


class Executor(Protocol):
    """Workers of every owner but the driver, by the names of `seats`. control_bytes: of messages to and from the
    driver, of steps, each with its length before it.
    """

    control_bytes: int

    def start(self, plan: Plan, models: Mapping[str, str], memory: Transport) -> None: ...

    def send(self, name: str, message: ToWorker) -> None: ...

    def wait(self, seconds: float) -> list[tuple[str, FromWorker]]:
        """The messages that have come, at least one. Raises DeadlineError after `seconds`, WorkerDied by name."""
        ...

    def stop(self, grace: float) -> None:
        """End every worker: asked first, killed after `grace` seconds (0: at once). Harmless when repeated."""
        ...


def environment() -> dict[str, str]:
    """What a worker's libraries read before they start. A user's own setting wins.

    How long OpenMP threads look for work before they sleep, in rounds of GNU's implementation. On two cores a decode
    step of 64 slots takes 175 ms where they sleep at once (OMP_WAIT_POLICY=PASSIVE), 123 ms with these, and 115 ms
    where they look for milliseconds, as by default; but by default two processes that share the cores take 1,700 ms
    for a step of 32 slots, in place of 180.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": "2000"}


def refuse_within_loop() -> None:
    """Raises RunError where an event loop runs, which leaves no room for that of InProcess."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    text = "the executor inproc runs an event loop of its own, and one runs here already, as in a notebook"
    raise RunError(text, 'use executor="processes", or run flowgraph from a terminal')


def refuse_processes(plan: Plan) -> None:
    """Raises RunError for an owner of several processes, which wait for each other: one can't hold them all."""
    for name, owner in plan.owners.items():
        if owner.processes > 1:
            text = f"owner {name} is {owner.processes} processes, and the executor inproc is one"
            raise RunError(text, f"use --executor processes, or give {name} one process")


class InProcess:
    """All workers on one event loop in this process; `wait` runs the loop until a reply is there.

    What a signal handler raises (a test's time limit does) comes up wherever this process is at that moment, and within
    a task asyncio keeps it: whoever waits for that task would wait for ever. So `wait` raises it.
    """

    def __init__(self, logs: Path | None = None) -> None:
        self.control_bytes = 0
        self.logs = str(logs or "")
        self.loop = asyncio.new_event_loop()
        self.workers: dict[str, Worker] = {}
        self.replies: deque[tuple[str, FromWorker]] = deque()
        self.arrived = asyncio.Event()
        self.struck: BaseException | None = None
        self.loop.set_task_factory(self._task)
        self.loop.set_exception_handler(self._unhandled)

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **more)
        # Not by task.exception(), after which asyncio would no longer tell of an error that nobody looked at.
        task.add_done_callback(lambda done: self._strike(done._exception))
        return task

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._strike(context.get("exception")):
            loop.default_exception_handler(context)

    def _strike(self, error: BaseException | None) -> bool:
        """Keep what is no error of whatever it came up in."""
        if error is None or isinstance(error, (Exception, asyncio.CancelledError)):
            return False
        self.struck = error
        self.arrived.set()
        return True

    def start(self, plan: Plan, models: Mapping[str, str], memory: Transport) -> None:
        os.environ.update(environment())
        made = seats(plan)
        for name, seat in made.items():
            arenas = memory.open(name, maps(plan, seat))
            reply = functools.partial(self._reply, name)
            self.workers[name] = Worker(plan, seat.owner, models, arenas, reply, self.logs, seat.rank)

        async def start_all() -> None:
            for name, worker in self.workers.items():
                try:
                    await worker.start()
                except Exception as error:
                    self._reply(name, failed(-1, f"{made[name].said} could not start", error))

        self.loop.run_until_complete(start_all())

    def _reply(self, name: str, message: FromWorker) -> None:
        self.control_bytes += HEAD + len(encode(message))
        self.replies.append((name, message))
        self.arrived.set()

    def send(self, name: str, message: ToWorker) -> None:
        self.control_bytes += HEAD + len(encode(message))
        self.loop.call_soon(self.workers[name].handle, message)

    def wait(self, seconds: float) -> list[tuple[str, FromWorker]]:
        async def until_reply() -> None:
            async with asyncio.timeout(seconds):
                await self.arrived.wait()

        try:
            if not self.replies:
                self.loop.run_until_complete(until_reply())
        except TimeoutError:
            raise DeadlineError(
                f"nothing came in {seconds:.0f} s", "raise run.deadline, or look at the hop in flight"
            ) from None
        if self.struck is not None:
            raise self.struck
        self.arrived.clear()
        out = list(self.replies)
        self.replies.clear()
        return out

    def stop(self, grace: float) -> None:
        if self.loop.is_closed():
            return
        self.loop.set_exception_handler(lambda loop, context: None)  # what a signal ended within is no news
        for worker in self.workers.values():
            self.loop.run_until_complete(_ended(worker))
        self.workers.clear()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


async def _ended(worker: Worker) -> None:
    """Close a worker. One of which a task waits for what a signal ended is left as it is."""
    done, _ = await asyncio.wait({asyncio.ensure_future(worker.close())}, timeout=ENDING)
    for closed in done:
        closed.result()


class _Link(Channel):
    """One worker process, and the driver's end of its channel."""

    def __init__(self, seat: Seat, process: subprocess.Popen[bytes], sock: socket.socket, log: Path) -> None:
        super().__init__(sock)
        self.seat, self.process, self.log = seat, process, log
        self.events = selectors.EVENT_READ

    def last_words(self) -> str:
        """The end of the worker's log, which may be large, for an error message."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
                lines = log.read().decode(errors="replace").strip().splitlines()[-5:]
        except OSError:
            return ""
        return "".join(f"\n    {line}" for line in lines)


class Processes:
    """One process an owner, or several, started fresh (no fork), that die with the driver. Nothing blocks: sends are
    queued. meeting: a directory of nobody else, where the processes of one owner find each other while it runs
    """

    def __init__(self, logs: Path) -> None:
        self.control_bytes = 0
        self.logs = logs
        self.links: dict[str, _Link] = {}
        self.selector = selectors.DefaultSelector()
        self.meeting: tempfile.TemporaryDirectory[str] | None = None

    def start(self, plan: Plan, models: Mapping[str, str], memory: Transport) -> None:
        """Begin starting every worker; each says Started in its time."""
        assert isinstance(memory, Shared), "other processes see nothing else"
        self.logs.mkdir(parents=True, exist_ok=True)
        if any(owner.processes > 1 for owner in plan.owners.values()):
            self.meeting = tempfile.TemporaryDirectory(prefix="flowgraph-", ignore_cleanup_errors=True)
        for name, seat in seats(plan).items():
            ours, theirs = socket.socketpair()
            command = [
                sys.executable,
                "-m",
                "flowgraph.runtime.worker",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            path = self.logs / f"{name}.log"
            variables = {
                **os.environ,
                **environment(),
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            }
            arenas = {place: memory.fds[place] for place in maps(plan, seat)}
            with theirs, path.open("wb") as log:
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno(), *arenas.values()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=variables,
                )
            link = _Link(seat, process, ours, path)
            self.links[name] = link
            self.selector.register(ours, selectors.EVENT_READ, link)
            store = str(Path(self.meeting.name, seat.owner)) if self.meeting else ""
            self.send(name, Setup(to_json(plan), *seat, dict(models), arenas, str(self.logs), store))

    def send(self, name: str, message: ToWorker) -> None:
        data = encode(message)
        self.control_bytes += HEAD + len(data)
        link = self.links[name]
        link.put(data)
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        try:
            link.flush()
        except ConnectionError:
            return  # `wait` finds the end of the stream and raises by name
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0)
        if events != link.events:
            link.events = events
            self.selector.modify(link.sock, events, link)

    def wait(self, seconds: float) -> list[tuple[str, FromWorker]]:
        deadline = time.monotonic() + seconds
        out: list[tuple[str, FromWorker]] = []
        while not out:
            ready = self._soon() or self.selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DeadlineError(
                    f"no worker answered in {seconds:.0f} s", f"look at {self.logs}, or raise run.deadline"
                )
            for key, mask in ready:
                link = key.data
                if mask & selectors.EVENT_WRITE:
                    self._flush(link)
                if mask & selectors.EVENT_READ:
                    frames, is_open = link.receive()
                    self.control_bytes += sum(HEAD + len(frame) for frame in frames)
                    out += [(link.seat.name, decode_from_worker(f)) for f in frames]
                    if not is_open and not frames:
                        self._died(link)
        return out

    def _soon(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Sockets that are ready within AWAKE. Whoever else wants this core gets it meanwhile."""
        until = time.monotonic() + AWAKE
        while not (ready := self.selector.select(0)) and time.monotonic() < until:
            os.sched_yield()
        return ready

    def _died(self, link: _Link) -> None:
        try:
            code = link.process.wait(2)
        except subprocess.TimeoutExpired:
            code = None
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        why = ""
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
            why = SIGNALS.get(-code, "")
        message = f"the worker of {link.seat.said} (pid {link.process.pid}) {how}{link.last_words()}"
        raise WorkerDied(message, f"{why}see {link.log}")

    def stop(self, grace: float) -> None:
        links, self.links = self.links, {}
        if grace > 0:
            for link in links.values():
                link.put(encode(Stop()))
                self._flush(link)
        until = time.monotonic() + grace
        for link in links.values():
            try:
                link.process.wait(max(0.0, until - time.monotonic()) if grace > 0 else 0)
            except subprocess.TimeoutExpired:
                link.process.kill()
                link.process.wait()
            self.selector.unregister(link.sock)
            link.sock.close()
        self.selector.close()
        if self.meeting is not None:
            self.meeting.cleanup()
