"""A ring's data plane and nothing else: one process writes blocks, others read them, and any of them may be killed.

`python -m tests.runtime.soak writer|reader FD` is one of the processes; `Soak` is who drives them. A message is a line
of JSON. Contents are drawn from the trajectory's number, so that a block can be checked by anyone who knows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from flowgraph.runtime.arena import Area
from flowgraph.runtime.desk import Desk
from flowgraph.runtime.leases import Region
from flowgraph.runtime.transport import Shared
from flowgraph.runtime.worker import die_with

AREA = Area(0, 1 << 22, 64)  # 256 MiB
READERS = 3


def content(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


# --- processes -----------------------------------------------------------------------------------------------------


def write(fd: int) -> None:
    """For {lease, number, nbytes, most, over}, a block with that content: {lease, offset}."""
    held = json.loads(sys.stdin.readline())
    desk = Desk(Shared({"writer": fd}).open("writer", ["writer"])["writer"], {"hop": AREA}, {"hop": held})
    for line in sys.stdin:
        message = json.loads(line)
        desk.free({"hop": message["over"]})
        if "lease" not in message:
            print(json.dumps({"placed": len(desk.regions["hop"].live)}), flush=True)
            continue
        nbytes = message["nbytes"]
        offset = desk.take("hop", message["most"])
        desk.arena.view[offset : offset + nbytes] = content(message["number"], nbytes)
        desk.trim("hop", offset, nbytes)
        print(json.dumps({"lease": message["lease"], "offset": offset}), flush=True)


def read(fd: int) -> None:
    """For {lease, offset, nbytes}, the checksum of what lies there: {lease, sum}."""
    view = Shared({"writer": fd}).open("reader", ["writer"])["writer"].view
    for line in sys.stdin:
        message = json.loads(line)
        start, end = message["offset"], message["offset"] + message["nbytes"]
        print(json.dumps({"lease": message["lease"], "sum": zlib.crc32(view[start:end])}), flush=True)


class Child:
    """A process, what it is at (lease → message), and its anonymous memory when it had warmed up."""

    def __init__(self, role: str, fd: int) -> None:
        self.role = role
        command = [sys.executable, "-m", "tests.runtime.soak", role, str(fd), str(os.getpid())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd], bufsize=0
        )
        self.at: dict[int, dict[str, Any]] = {}
        self.rest = b""
        self.replies = self.warm = 0

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and that shows when its replies end
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def heard(self) -> tuple[list[dict[str, Any]], bool]:
        """Whole messages that have come, and whether more may."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.replies += len(lines)
        if not self.warm and self.replies > 100:
            self.warm = self.anonymous()
        return [json.loads(line) for line in lines], bool(data)

    def anonymous(self) -> int:
        return anonymous(self.process.pid) if self.process.poll() is None else 0

    def grown(self) -> int:
        """Bytes of memory of its own more than when it had warmed up; 0 for one that never did."""
        return self.anonymous() - self.warm if self.warm else 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def anonymous(pid: int) -> int:
    """Bytes of a process's memory that are no file's and no arena's, its share where they are shared."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))


# --- who drives them -------------------------------------------------------------------------------------------------


class Soak:
    """Send so many trajectories through the arena. Each is written, read by one reader, and freed.

    killed: the roles of processes that were killed; growth: the most bytes that one grew after it had warmed up
    arena: bytes of the arena that are in memory, now and then; placed: blocks alive at the end, as the writer has it
    """

    def __init__(self, trajectories: int, kills: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.left = deque(range(trajectories))
        self.total, self.done, self.lost = trajectories, 0, 0
        self.kill_at = deque(sorted(self.rng.sample(range(trajectories // 20, trajectories), kills)))
        self.killed: list[str] = []
        self.memory = Shared.create({"writer": AREA.size * AREA.frames})
        self.fd = self.memory.fds["writer"]
        self.region = Region("hop", AREA)
        self.trajectories: dict[int, tuple[int, int]] = {}  # lease → number, bytes
        self.growth = 0
        self.placed = -1
        self.arena: list[int] = []
        self.writer = self.start_writer()
        self.readers = [Child("reader", self.fd) for _ in range(READERS)]

    def start_writer(self) -> Child:
        child = Child("writer", self.fd)
        self.region.freed.clear()  # it places beside what is there
        child.send([(h.offset, h.nbytes) for h in self.region.leases.values() if h.offset >= 0])
        return child

    def run(self) -> None:
        try:
            while self.done < self.total:
                self.fire()
                self.hear()
                self.kill()
            if self.writer.process.poll() is not None:
                self.replace(self.writer)
            self.placed = self.count()
            self.look()
        finally:
            for child in self.children():
                child.end()
            self.memory.close()

    def kill(self) -> None:
        """Whoever lives, at any moment of its work, as often as it is due; it is replaced when that shows."""
        while self.kill_at and self.done >= self.kill_at[0]:
            alive = [child for child in self.children() if child.process.poll() is None]
            if not alive:
                return
            self.kill_at.popleft()
            child = self.rng.choice(alive)
            child.process.kill()
            child.process.wait()
            self.killed.append(child.role)

    def look(self) -> None:
        self.growth = max([self.growth, *(child.grown() for child in self.children())])
        self.arena.append(os.fstat(self.fd).st_blocks * 512)

    def children(self) -> Iterator[Child]:
        yield self.writer
        yield from self.readers

    def fire(self) -> None:
        """Have as many written as there is room for. Most are small, some are as large as a frame."""
        while self.left and self.region.can_lease():
            number = self.left.popleft()
            size = (
                AREA.size
                if number % 97 == 0
                else int(min(AREA.size, 40_000 * self.rng.lognormvariate(0, 1.3)))
            )
            lease = self.region.lease("writer")
            self.trajectories[lease] = number, size
            over, self.region.freed = self.region.freed, []
            most = AREA.size if number % 7 == 0 else size  # what is bounded loosely is trimmed
            message = {"lease": lease, "number": number, "nbytes": size, "most": most, "over": over}
            self.writer.at[lease] = message
            self.writer.send(message)

    def hear(self) -> None:
        children = {child.process.stdout: child for child in self.children()}
        ready, _, _ = select.select(list(children), [], [], 60)
        assert ready, "nobody answers"
        for pipe in ready:
            child = children[pipe]
            messages, more = child.heard()
            for message in messages:
                del child.at[message["lease"]]
                self.written(**message) if child.role == "writer" else self.checked(**message)
            if not more:
                self.replace(child)

    def written(self, lease: int, offset: int) -> None:
        self.region.settle(lease, offset, self.trajectories[lease][1])
        self.give(lease)

    def give(self, lease: int) -> None:
        reader, held = self.rng.choice(self.readers), self.region.at(lease)
        reader.at[lease] = {"lease": lease, "offset": held.offset, "nbytes": held.nbytes}
        reader.send(reader.at[lease])

    def checked(self, lease: int, sum: int) -> None:
        number, nbytes = self.trajectories.pop(lease)
        assert sum == zlib.crc32(content(number, nbytes)), f"trajectory {number} is not what was written"
        self.region.release(lease)
        self.done += 1
        if self.done % 500 == 0:
            self.look()

    def replace(self, child: Child) -> None:
        """A process was killed: one like it takes over. What a writer had not handed over is written anew."""
        child.end()
        if child.role == "writer":
            lost = self.region.reclaim("writer")
            assert sorted(child.at) == lost
            self.lost += len(lost)
            self.left.extendleft(self.trajectories.pop(lease)[0] for lease in lost)
            self.writer = self.start_writer()
            return
        self.readers[self.readers.index(child)] = Child("reader", self.fd)
        for lease in child.at:
            self.give(lease)

    def count(self) -> int:
        """Blocks that the writer takes to be alive."""
        self.writer.send({"over": self.region.freed})
        self.region.freed.clear()
        messages, more = self.writer.heard()
        while not messages and more:
            messages, more = self.writer.heard()
        return int(messages[0]["placed"])


if __name__ == "__main__":
    die_with(int(sys.argv[3]))
    (write if sys.argv[1] == "writer" else read)(int(sys.argv[2]))
