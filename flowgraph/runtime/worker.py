"""One owner's side: it holds the resources, and runs hops on blocks. In this process or in one of its own."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from flowgraph.errors import PromiseBroken, Rejected, RunError
from flowgraph.learners.protocol import Critic, Learner
from flowgraph.learners.ranks import Ranks
from flowgraph.learners.registry import LearnerOptions
from flowgraph.plan.layout import lengths
from flowgraph.plan.plan import Hop, Owner, Plan, from_json
from flowgraph.runtime import pieces, purity, reading, writing
from flowgraph.runtime.arena import Arena, areas
from flowgraph.runtime.blame import member_of
from flowgraph.runtime.channel import Channel, receive_first
from flowgraph.runtime.desk import Desk
from flowgraph.runtime.inplace import Offer
from flowgraph.runtime.joining import Parts
from flowgraph.runtime.messages import (
    Done,
    Failed,
    Fire,
    FromWorker,
    Gone,
    Interrupt,
    Join,
    Part,
    Save,
    Saved,
    Setup,
    Started,
    Stop,
    ToWorker,
    bits,
    decode_to_worker,
    encode,
)
from flowgraph.runtime.seats import Seat
from flowgraph.runtime.transport import Shared
from flowgraph.spec.config import build_config, import_object
from flowgraph.spec.hop import HopSpec, read_spec


def fill(hop: Hop, resources: Mapping[str, Any]) -> tuple[HopSpec, dict[str, Any]]:
    """A hop's signature, and every keyword-only parameter with its value: default, `with:`, dims and run, resources."""
    spec = read_spec(hop.use, import_object(hop.use))
    fixed = {p.name: p.default for p in spec.params if not p.required}
    fixed |= {**build_config(spec, hop.config), **hop.bound}
    return spec, fixed | {param: resources[kind] for param, kind in hop.resources.items()}


def alone(what: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end where there may be no event loop, or one already, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, what).result()


def threads_of(owner: Owner) -> int:
    """Threads of a process: its part of what the file says, else of the owner's share of the cores that it may use."""
    return max(1, (owner.threads or len(os.sched_getaffinity(0)) // owner.share) // owner.processes)


class Worker:
    """Runs the hops of one owner. `send` takes each reply; a concurrent hop's firings run side by side as tasks.

    rank: of the owner's processes; all but the first hold the learner alone, run the hops that use it, each on its own
    trajectories, and write no more than their part of what these give for each row
    store: the file by which these processes find each other
    """

    def __init__(
        self,
        plan: Plan,
        owner: str,
        models: Mapping[str, str],
        arenas: Mapping[str, Arena],
        send: Callable[[FromWorker], None],
        logs: str = "",
        rank: int = 0,
        store: str = "",
    ) -> None:
        self.logs, self.rank, self.store = logs, rank, store
        self.plan, self.owner, self.models, self.send = plan, plan.owners[owner], models, send
        self.views = {name: arena.view for name, arena in arenas.items()}
        threads = threads_of(self.owner)
        self.desk = Desk(arenas[owner], areas(plan)[owner], threads=threads)
        several = self.owner.processes > 1
        self.parts = Parts(plan, self.owner, rank, arenas, self.desk) if several else None
        # Folds are the driver's own: it binds and fires them itself.
        mine = {n: hop for n, hop in plan.hops.items() if hop.owner == owner and hop.kind != "fold"}
        self.hops = {n: hop for n, hop in mine.items() if rank == 0 or plan.processes(hop) > 1}
        self.ranks: Ranks | None = None  # of the learner
        self.calls: dict[str, Callable[..., Any]] = {}
        self.functions: dict[str, Callable[..., Any]] = {}  # as they are written, without what is bound
        self.resources: dict[str, Any] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.interrupted: set[int] = set()

    async def start(self) -> None:
        """Load engine, learner and tokenizer, and bind every hop's configuration; then say Started."""
        began = time.monotonic()
        owner = self.owner
        if owner.engine is not None and self.rank == 0:
            from flowgraph.engines.registry import start_engine

            self.resources["engine"] = await start_engine(
                owner.engine,
                self.models[owner.engine.model],
                context=owner.context,
                threads=threads_of(owner),
                logs=self.logs,
                journal=journal_file(self.logs, owner.name),
                patience=0.9 * self.plan.run.deadline,  # it says why, before the driver gives up
            )
        if owner.learner is not None:
            self.resources["learner"] = self._learner(owner, owner.learner)
        if owner.tokenizer is not None:
            from flowgraph.models import Tokenizer

            self.resources["tokenizer"] = Tokenizer(self.models[owner.tokenizer])
        for name, hop in self.hops.items():
            spec, fixed = fill(hop, self.resources)
            self.functions[name] = spec.function
            self.calls[name] = functools.partial(spec.function, **fixed)
        self.send(Started(owner.name, time.monotonic() - began))

    def _learner(self, owner: Owner, options: LearnerOptions) -> Learner | Critic:
        from flowgraph.learners.registry import create_learner

        deadline = 0.9 * self.plan.run.deadline  # it says who is missing, before the driver gives up
        self.ranks = Ranks(self.rank, owner.processes, store=self.store, deadline=deadline)
        return create_learner(
            options, self.models[options.model], threads=threads_of(owner), ranks=self.ranks
        )

    def handle(self, message: ToWorker) -> None:
        """Take one message; replies come through `send`, for concurrent hops later. Needs a running event loop."""
        if isinstance(message, Fire):
            self.desk.free(message.over)
            hop = self.hops[message.hop]
            if hop.concurrent and self.owner.name == "driver":
                alone(self._fire_async(hop, message))  # the driver has nothing to do meanwhile
            elif hop.concurrent:
                task = asyncio.get_running_loop().create_task(self._fire_async(hop, message))
                self.tasks[message.id] = task
                task.add_done_callback(functools.partial(self._ended, message.id))
            else:
                self._fire(hop, message)
        elif isinstance(message, Join):
            assert self.parts is not None, "only a part is joined"
            try:
                self.send(Done(message.id, [self.parts.join(self.hops[message.hop], message)]))
            except Exception as error:
                self.send(failed(message.id, f"joining what hop {message.hop} gave", error))
        elif isinstance(message, Interrupt):
            if message.id in self.tasks:
                self.interrupted.add(message.id)
                self.tasks[message.id].cancel()
        elif isinstance(message, Save):
            try:
                self.resources["learner"].save(message.directory)
                self.send(Saved(message.directory))
            except Exception as error:
                self.send(failed(-1, f"saving the model to {message.directory}", error))

    def _ended(self, id: int, task: asyncio.Task[None]) -> None:
        del self.tasks[id]
        if (
            task.cancelled() and id in self.interrupted
        ):  # before it had begun, so that it could not say so itself
            self.send(Gone(id, ""))
        self.interrupted.discard(id)

    def _fire(self, head: Hop, fire: Fire) -> None:
        """Run a hop, and those of its group after it."""
        reader = reading.Reader(self.plan, self.views, fire.share)
        if self.ranks is not None:
            self.ranks.places = pieces.places(fire.share, "leaf")
        handed: dict[str, Any] = {}
        leaves = fire.leaves
        parts: list[Part] = []
        for name in head.group or (head.name,):
            try:
                began = time.monotonic()
                hop = self.hops[name]
                read = reader.inputs(hop, fire.blocks, leaves, handed)
                call, values = self.calls[name], {**read.values, **fire.values}
                with self._offer(hop, fire) as offer:
                    if self._verifies(hop):
                        result = purity.call(f"hop {name}", call, values, hop.resources)
                    else:
                        result = call(**values)
                    parts.append(self._part(hop, fire, result, read, began, handed, offer))
                if hop.rows == "trajectory":  # its leaves may be known only now
                    leaves = [lengths(hop, parts[-1].sizes).get("leaf", leaves[0])]
            except Rejected as error:
                for before, part in zip(head.group, parts, strict=False):  # it is none of the first
                    self.desk.free({before: [part.offset]} if part.offset >= 0 else {})
                self.send(self._gone(hop, fire, error))
                return
            except (Exception, SystemExit) as error:
                self.send(failed(fire.id, f"hop {name}", error))
                return
        self.send(Done(fire.id, parts))

    async def _fire_async(self, hop: Hop, fire: Fire) -> None:
        try:
            began = time.monotonic()
            read = reading.Reader(self.plan, self.views, fire.share).inputs(hop, fire.blocks, fire.leaves, {})
            call, values = self.calls[hop.name], {**read.values, **fire.values}
            with self._offer(hop, fire) as offer:
                if self._verifies(hop):
                    result = await purity.call_async(f"hop {hop.name}", call, values, hop.resources)
                else:
                    result = await call(**values)
                part = self._part(hop, fire, result, read, began, {}, offer)
            self.send(Done(fire.id, [part]))
        except Rejected as error:
            self.send(self._gone(hop, fire, error))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and fire.id in self.interrupted:
                self.send(Gone(fire.id, ""))
                return
            if task is not None and task.cancelling():  # the run is over; else something within was cancelled
                raise
            self.send(failed(fire.id, f"hop {hop.name}", error))

    def _gone(self, hop: Hop, fire: Fire, error: Rejected) -> FromWorker:
        """What a hop says that gives up its row: only a trajectory may come to nothing."""
        if hop.rows == "trajectory":
            return Gone(fire.id, error.reason)
        return failed(fire.id, f"hop {hop.name}, which works on no trajectory", error)

    def _offer(self, hop: Hop, fire: Fire) -> Offer:
        """A place for the hop to write into, where what it gives is the whole of a block."""
        return Offer(self.desk, hop, self.functions[hop.name], whole=fire.share is None)

    def _verifies(self, hop: Hop) -> bool:
        return self.plan.verify and hop.kind == "hop"

    def _part(
        self, hop: Hop, fire: Fire, result: Any, read: reading.Inputs, began: float, handed: dict[str, Any],
        offer: Offer,
    ) -> Part:  # fmt: skip
        """Write a hop's outputs, and lay out for its group what is not written."""
        outputs = result._asdict() if hasattr(result, "_asdict") else {"out": result}
        omit = [name.partition(".")[2] for name in fire.omit if name.partition(".")[0] == hop.name]
        try:
            if self.plan.verify:
                writing.verify(hop, outputs, read)
            given = writing.checked(hop, hop.checked, outputs, read.sizes)
            if fire.share is not None and self.parts is not None:
                stored = self.parts.store(hop, fire.share, outputs, given, omit, read)
            else:
                given = offer.accept(given)
                stored = self.desk.store(hop, outputs, given, omit, read, offer.offset)
            if hop.group:
                handed |= writing.hand_on(hop, given)
        except PromiseBroken as error:
            error.member = member_of(error, self.plan, hop, {**read.values, **outputs}, fire.leaves)
            raise
        values = {name: outputs[name] for name, kind in hop.outputs.items() if kind == "value"}
        scalars: dict[str, float] = {}
        for name, kind in hop.outputs.items():
            if kind == "scalars":
                scalars |= {key: float(value) for key, value in outputs[name].items()}
        reads = [one.port for one in hop.reads]
        return Part(
            stored.offset,
            stored.nbytes,
            stored.sizes,
            values,
            scalars,
            tuple(read.nbytes[port] for port in reads),
            reading.met_driver(hop, read.homes),
            time.monotonic() - began,
            placed=bits([column.name for column in hop.written], offer.written),
            joined=bits(reads, read.joined),
        )

    async def close(self) -> None:
        """Cancel what runs and free the resources."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:  # one that does not let itself be cancelled is left
            await asyncio.wait(tasks, timeout=5.0)
        if "engine" in self.resources:
            await self.resources.pop("engine").close()
        if "learner" in self.resources:
            self.resources.pop("learner").close()


def journal_file(logs: str, owner: str) -> Callable[[Any], None]:
    """Takes the entries of an engine's journal of syncs, a line of JSON each; without a directory, they are let go."""
    if not logs:
        return lambda entry: None
    path = Path(logs, f"{owner}.sync.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(entry: Any) -> None:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    return write


def failed(id: int, where: str, error: BaseException) -> Failed:
    """What the driver needs to raise the same error by name."""
    detail = "".join(traceback.format_exception(error))
    if isinstance(error, RunError):
        member = error.member if isinstance(error, PromiseBroken) else -1
        return Failed(id, error.code, error.message, error.help, detail, member)
    help = "the traceback is in error.txt of the run directory"
    return Failed(id, "FG902", f"{where}: {type(error).__name__}: {error}", help, detail)


# --- as a process ----------------------------------------------------------------------------------------------


def main() -> None:
    """`python -m flowgraph.runtime.worker FD PARENT`: serve the driver at the other end of the socket FD."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    sock = socket.socket(fileno=fd)
    first = receive_first(sock)
    if first is not None:
        asyncio.run(_serve(Channel(sock), first))


def die_with(parent: int) -> None:
    """The kernel kills this process when the driver ends, however that ends; Ctrl-C is the driver's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


async def _serve(channel: Channel, first: bytes) -> None:
    """Do what the driver says until it says Stop, or is gone."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    setup = decode_to_worker(first)
    assert isinstance(setup, Setup), "the first message is Setup"
    seat = Seat(setup.owner, setup.rank)

    def send(message: FromWorker) -> None:
        channel.put(encode(message))
        flush()

    def flush() -> None:
        try:
            channel.flush()
        except ConnectionError:
            channel.outbox.clear()  # the driver is gone, and this process with it
        if channel.outbox:
            loop.add_writer(channel.sock, more)

    def more() -> None:
        loop.remove_writer(channel.sock)
        flush()

    worker = None
    try:
        plan = from_json(setup.plan)
        arenas = Shared(setup.arenas).open(seat.name, setup.arenas)
        worker = Worker(plan, setup.owner, setup.models, arenas, send, setup.logs, setup.rank, setup.store)
        await worker.start()
    except Exception as error:
        send(failed(-1, f"{seat.said} could not start", error))

    def arrived() -> None:
        frames, is_open = channel.receive()
        try:
            for message in map(decode_to_worker, frames):
                if isinstance(message, Stop):
                    is_open = False
                elif worker is not None:
                    worker.handle(message)
        except BaseException as error:
            loop.remove_reader(channel.sock)
            over.set_exception(error)
            return
        if not is_open:
            loop.remove_reader(channel.sock)
            over.set_result(None)

    loop.add_reader(channel.sock, arrived)
    await over
    if worker is not None:
        await worker.close()
    channel.sock.close()


if __name__ == "__main__":
    main()
