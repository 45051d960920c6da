"""Tensors through flowgraph's arenas: the worker processes, messages and memory that a run uses, fired by hand."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import flowgraph
from bench.seam_hops import words
from flowgraph.runtime import writing
from flowgraph.runtime.arena import areas
from flowgraph.runtime.desk import Desk
from flowgraph.runtime.executors import Processes
from flowgraph.runtime.messages import Block, Done, Fire, Part, Started
from flowgraph.runtime.transport import arenas

GRAPH = Path(__file__).with_name("seams.yaml")
DEADLINE = 60.0  # seconds that any one message may take
WARM = 2  # runs before those that count


class Pair:
    """Two workers, giver and taker, and the driver between them, which sees descriptors only."""

    def __init__(self, plan: flowgraph.Plan, executor: Processes, desk: Desk) -> None:
        self.plan, self.executor, self.desk = plan, executor, desk
        self.ids = itertools.count()
        self.last: dict[str, int] = {}

    def fire(self, hop: str, blocks: Mapping[str, Block]) -> Part:
        """Have a hop run on these blocks: what it gave. The block that it wrote before is over."""
        lists = {name: [block] for name, block in blocks.items()}
        over = {hop: [self.last.pop(hop)]} if hop in self.last else {}
        self.executor.send(self.plan.hops[hop].owner, Fire(next(self.ids), hop, 0, lists, [1], {}, over))
        ((_, message),) = self.executor.wait(DEADLINE)
        assert isinstance(message, Done), message
        self.last[hop] = message.parts[0].offset
        return message.parts[0]

    def prompt(self, run: int) -> Block:
        """The number of a run, in the driver's arena."""
        hop, values = self.plan.hops["dataset"], {"prompt": np.array([run], np.int32)}
        self.desk.free({"dataset": list(self.desk.regions["dataset"].live)})
        stored = self.desk.store(hop, values, writing.checked(hop, hop.columns, values))
        return Block(stored.offset, stored.sizes)

    def move(self, run: int) -> tuple[dict[str, float], Block]:
        """Eight tensors from giver to taker, in seconds; and the block that the taker wrote."""
        given = self.fire("give", {"dataset": self.prompt(run)})
        taken = self.fire("take", {"give": Block(given.offset, given.sizes)})
        a, b = given.scalars, taken.scalars
        assert (a["high"], a["low"]) == (b["high"], b["low"]), f"run {run}: other bytes came than were sent"
        times = {"there": b["there"] - a["given"], "done": b["taken"] - a["given"], "read": b["local"]}
        times |= {name: a[name] for name in ("memcpy_1", "memcpy_2")}
        return times, Block(taken.offset, taken.sizes)


@contextmanager
def pair(nbytes: int, *, place: bool, threads: int) -> Iterator[Pair]:
    """Both workers, until the end; threads: of the giver's copies, when it does not place its tensors."""
    each = words(nbytes)
    dims = {"word": each, "half": 2 * each, "quarter": 4 * each, "byte": 8 * each}
    overrides = {f"dims.{name}": size for name, size in dims.items()}
    overrides |= {"hops.give.with": {"nbytes": nbytes, "place": place}, "owners.giver.threads": threads}
    plan = flowgraph.compile(GRAPH, overrides, no_pass=("fuse",))
    with tempfile.TemporaryDirectory() as logs, arenas(plan) as memory:
        executor = Processes(Path(logs))
        try:
            executor.start(plan, {}, memory)
            started = 0
            while started < 2:
                for _, message in executor.wait(DEADLINE):
                    assert isinstance(message, Started), message
                    started += 1
            yield Pair(
                plan, executor, Desk(memory.open("driver", ["driver"])["driver"], areas(plan)["driver"])
            )
        finally:
            executor.stop(2.0)


def moved(nbytes: int, runs: int, *, place: bool, threads: int = 1) -> list[dict[str, float]]:
    """Of each run: seconds until the tensors were there, until they were read (done), and of the limits beside them."""
    with pair(nbytes, place=place, threads=threads) as both:
        return [both.move(run)[0] for run in range(runs + WARM)][WARM:]


def round_trips(count: int) -> list[float]:
    """Seconds from a firing's message to its answer at the driver, of a hop that does nothing on a block."""
    with pair(1 << 20, place=True, threads=1) as both:
        _, block = both.move(0)
        out = []
        for _ in range(count + 100):
            began = time.perf_counter()
            both.fire("note", {"take": block})
            out.append(time.perf_counter() - began)
        return out[100:]
