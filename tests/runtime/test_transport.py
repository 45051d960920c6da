"""What every transport does, each of them for real: one process that writes, and readers here or in another process."""

from __future__ import annotations

import mmap
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from flowgraph.runtime.arena import Area
from flowgraph.runtime.desk import Desk
from flowgraph.runtime.leases import Region
from flowgraph.runtime.transport import Heap, Shared, Transport

SIZES = {"writer": 1 << 20, "reader": mmap.PAGESIZE}
AREA = Area(64, 100_032, 10)

# Offset and length of what lies in the writer's memory, by descriptor alone → the bytes there.
Look = Callable[[int, int], bytes]

# A process of the owner `reader`: it answers each line "offset length" with the bytes there, in hex.
READER = """
import sys
from flowgraph.runtime.transport import Shared
view = Shared({"writer": int(sys.argv[1])}).open("reader", ["writer"])["writer"].view
for line in sys.stdin:
    at, n = map(int, line.split())
    print(bytes(view[at : at + n]).hex(), flush=True)
"""


class Case:
    """A transport, and how a reader elsewhere looks into the writer's memory."""

    def __init__(self, transport: Transport, look: Look) -> None:
        self.transport, self.look = transport, look
        self.desk = Desk(transport.open("writer", SIZES)["writer"], {"hop": AREA})
        self.region = Region("hop", AREA)

    def put(self, data: bytes, most: int = AREA.size) -> int:
        """A block with this in it; its lease."""
        self.desk.free({"hop": self.region.freed})
        self.region.freed.clear()
        lease = self.region.lease("writer")
        offset = self.desk.take("hop", most)
        self.desk.arena.view[offset : offset + len(data)] = data
        self.desk.trim("hop", offset, len(data))
        self.region.settle(lease, offset, len(data))
        return lease

    def view(self, lease: int) -> bytes:
        held = self.region.at(lease)
        return self.look(held.offset, held.nbytes)


@pytest.fixture(params=["shared, another process", "shared", "heap"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    transport: Transport = Heap(SIZES) if request.param == "heap" else Shared.create(SIZES)
    if request.param != "shared, another process":
        view = transport.open("reader", ["writer"])["writer"].view
        yield Case(transport, lambda at, n: bytes(view[at : at + n]))
        transport.close()
        return
    assert isinstance(transport, Shared)
    fd = transport.fds["writer"]
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[fd],
    ) as process:

        def ask(at: int, n: int) -> bytes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{at} {n}\n")
            process.stdin.flush()
            return bytes.fromhex(process.stdout.readline())

        yield Case(transport, ask)
        transport.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def test_what_is_written_is_what_a_reader_sees_through_many_generations(case: Case) -> None:
    rng = random.Random(0)
    alive: dict[int, bytes] = {}
    for _ in range(300):
        if len(alive) == AREA.frames or (alive and rng.random() < 0.4):
            lease = rng.choice(sorted(alive))
            assert case.view(lease) == alive.pop(lease)
            case.region.release(lease)
        else:
            data = rng.randbytes(rng.choice([0, 1, 500, 40_000, AREA.size]))
            alive[case.put(data)] = data
    assert all(case.view(lease) == data for lease, data in alive.items())
    for lease in alive:
        case.region.release(lease)
    assert case.region.gauge.live == 0


def test_who_reads_can_not_write(case: Case) -> None:
    opened = case.transport.open("reader", SIZES)
    with pytest.raises(TypeError, match="read-only"):
        opened["writer"].view[0] = 1
    opened["reader"].view[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        case.transport.open("writer", SIZES)["reader"].view[0] = 2


def test_who_comes_later_sees_what_is_there_and_places_beside_it(case: Case) -> None:
    """The writer is replaced: what it had handed over stays, and what comes then does not touch it."""
    first = case.put(b"handed over")
    lost = case.region.lease("writer")
    case.desk.take("hop", 1000)
    assert case.region.reclaim("writer") == [lost]
    held = [(one.offset, one.nbytes) for one in case.region.leases.values()]
    case.desk = Desk(case.transport.open("writer", ["writer"])["writer"], {"hop": AREA}, {"hop": held})
    others = [case.put(bytes([i]) * 5000, 5000) for i in range(AREA.frames - 1)]
    assert case.view(first) == b"handed over"
    assert [case.view(lease) for lease in others] == [bytes([i]) * 5000 for i in range(len(others))]


def test_what_is_open_outlives_the_transport(case: Case) -> None:
    lease = case.put(b"still here")
    case.transport.close()
    assert case.view(lease) == b"still here"


WRITES = """
import ctypes, sys
import numpy as np
from flowgraph.runtime.transport import Shared
view = Shared({"writer": int(sys.argv[1])}).open("reader", ["writer"])["writer"].view
ctypes.memset(np.frombuffer(view, np.uint8).ctypes.data, 1, 8)
"""


def test_the_kernel_ends_a_reader_that_writes_past_all_types() -> None:
    memory = Shared.create(SIZES)
    fd = memory.fds["writer"]
    done = subprocess.run([sys.executable, "-c", WRITES, str(fd)], pass_fds=[fd], check=False)
    assert done.returncode == -signal.SIGSEGV
    assert bytes(memory.open("reader", ["writer"])["writer"].view[:8]) == bytes(8)
    memory.close()
