"""Blocks in an arena: where they are placed, who holds them, and what becomes of those of a process that has ended."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowgraph.errors import LedgerError
from flowgraph.runtime.arena import CHUNK, Area, Arena
from flowgraph.runtime.buddy import ALIGN, Buddy
from flowgraph.runtime.desk import Desk
from flowgraph.runtime.leases import Region
from flowgraph.runtime.pages import LARGE, Pages, address
from flowgraph.runtime.transport import Shared

SIZES = st.one_of(st.sampled_from([64, 1000, 1 << 14, 99_968, 100_032]), st.integers(1, 300_000))


@contextmanager
def shared(size: int) -> Iterator[Shared]:
    memory = Shared.create({"own": size})
    try:
        yield memory
    finally:
        memory.close()


def arena(memory: Shared, owner: str = "own") -> Arena:
    return memory.open(owner, ["own"])["own"]


# --- placing -------------------------------------------------------------------------------------------------------


class Placing(RuleBasedStateMachine):
    """Allocate, trim, release and take over, in any order: pieces tile the frames, and a full block has a place."""

    @initialize(size=SIZES, count=st.integers(1, 5), base=st.sampled_from([0, 64, 4096]))
    def start(self, size: int, count: int, base: int) -> None:
        self.buddy = Buddy(base, size, count)
        self.blocks: dict[int, int] = {}

    def room(self) -> bool:
        return len(self.blocks) < self.buddy.count

    @precondition(room)
    @rule(share=st.floats(0, 1))
    def allocate(self, share: float) -> None:
        nbytes = int(share * self.buddy.size)
        offset = self.buddy.allocate(nbytes)
        assert offset not in self.blocks
        self.blocks[offset] = nbytes

    @precondition(room)
    @rule()
    def a_full_block_has_a_place_and_is_the_lowest_of_the_empty_frames(self) -> None:
        lowest = self.buddy.free[0][0]
        assert self.buddy.allocate(self.buddy.size) == lowest
        self.blocks[lowest] = self.buddy.size

    @precondition(lambda self: self.blocks)
    @rule(pick=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def trim(self, pick, share: float) -> None:  # type: ignore[no-untyped-def]
        offset = pick.choice(sorted(self.blocks))
        self.blocks[offset] = int(self.blocks[offset] * share)
        self.buddy.trim(offset, self.blocks[offset])

    @precondition(lambda self: self.blocks)
    @rule(pick=st.randoms(use_true_random=False))
    def release(self, pick) -> None:  # type: ignore[no-untyped-def]
        offset = pick.choice(sorted(self.blocks))
        del self.blocks[offset]
        self.buddy.release(offset)

    @rule()
    def take_over(self) -> None:
        """Who starts anew from what is alive places as the one before would have."""
        again = Buddy(self.buddy.base, self.buddy.size, self.buddy.count)
        for offset, nbytes in self.blocks.items():
            again.occupy(offset, nbytes)
        assert (again.free, again.live) == (self.buddy.free, self.buddy.live)
        self.buddy = again

    @invariant()
    def pieces_tile_the_frames(self) -> None:
        buddy = self.buddy
        pieces = [(o, level) for level, free in enumerate(buddy.free) for o in free]
        assert all(free == sorted(free) for free in buddy.free)
        pieces += buddy.live.items()
        frames: dict[int, list[tuple[int, int]]] = {}
        for offset, level in sorted(pieces):
            at = offset - buddy.base
            frames.setdefault(at // buddy.size, []).append((at % buddy.size, buddy.bytes_at(level)))
        assert sorted(frames) == list(range(buddy.count))
        for parts in frames.values():
            ends = [start + size for start, size in parts]
            assert [start for start, _ in parts] == [0, *ends[:-1]], "each begins where the one before ends"
            assert ends[-1] in (buddy.size, buddy.unit << buddy.levels)
        assert buddy.live.keys() == self.blocks.keys()
        assert all(buddy.bytes_at(buddy.live[o]) >= n for o, n in self.blocks.items())
        assert buddy.whole >= buddy.count - len(self.blocks), "a block lies in one frame"

    def teardown(self) -> None:
        for offset in getattr(self, "blocks", ()):
            self.buddy.release(offset)
        if hasattr(self, "buddy"):
            assert self.buddy.whole == self.buddy.count, "nothing is left but whole frames"


TestPlacing = Placing.TestCase
TestPlacing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_lie_on_cache_lines_in_the_smallest_class_that_holds_them() -> None:
    buddy = Buddy(0, 100_032, 2)
    offsets = [buddy.allocate(n) for n in (1, 7000, 30_000)]
    assert all(offset % ALIGN == 0 for offset in offsets)
    assert [buddy.bytes_at(buddy.live[o]) for o in offsets] == [6208, 12_416, 49_664]
    assert buddy.whole == 1, "they share one frame"


# --- driver and worker ---------------------------------------------------------------------------------------------


class Two(RuleBasedStateMachine):
    """The driver's ledger and a worker's allocator, with messages on the way between them, and workers that die.

    Every block is filled with the number of its lease, so one that is written over shows.
    """

    @initialize(size=st.integers(300, 20_000), count=st.integers(1, 6))
    def start(self, size: int, count: int) -> None:
        self.area = Area(64, size, count)
        self.memory = Shared.create({"own": 64 + size * count})
        self.reader = arena(self.memory, "reader")
        self.region = Region("hop", self.area)
        self.dead: list[int] = []
        self.sizes: dict[int, int] = {}
        self.worker()

    def worker(self) -> None:
        held = [(h.offset, h.nbytes) for h in self.region.leases.values() if h.offset >= 0]
        self.region.freed.clear()  # who starts anew has not placed them
        self.desk = Desk(arena(self.memory), {"hop": self.area}, {"hop": held})
        self.down: deque[tuple[int, list[int]]] = deque()  # firings: lease, and what is over
        self.up: deque[tuple[int, int, int]] = deque()  # replies: lease, offset, bytes

    @precondition(lambda self: self.region.can_lease())
    @rule()
    def fire(self) -> None:
        over, self.region.freed = self.region.freed, []
        self.down.append((self.region.lease("rollout"), over))

    @precondition(lambda self: self.down)
    @rule(most=st.floats(0, 1), share=st.floats(0, 1))
    def write(self, most: float, share: float) -> None:
        lease, over = self.down.popleft()
        self.desk.free({"hop": over})
        bound = int(most * self.area.size)
        nbytes = int(share * bound)
        offset = self.desk.take("hop", bound)
        self.desk.arena.view[offset : offset + nbytes] = bytes([lease % 256]) * nbytes
        self.desk.trim("hop", offset, nbytes)
        self.up.append((lease, offset, nbytes))

    @precondition(lambda self: self.up)
    @rule()
    def hear(self) -> None:
        lease, offset, nbytes = self.up.popleft()
        self.region.settle(lease, offset, nbytes)
        self.sizes[lease] = nbytes

    @precondition(lambda self: self.sizes)
    @rule(pick=st.randoms(use_true_random=False))
    def release(self, pick) -> None:  # type: ignore[no-untyped-def]
        lease = pick.choice(sorted(self.sizes))
        del self.sizes[lease]
        self.region.release(lease)
        self.dead.append(lease)

    @rule()
    def die(self) -> None:
        """What it had leased comes back; what it had handed over is kept, and a late word of it is refused."""
        late = list(self.up)
        lost = self.region.reclaim("rollout")
        assert lost == sorted({lease for lease, *_ in (*self.down, *self.up)})
        for lease, offset, nbytes in late:
            with pytest.raises(
                LedgerError, match=f"writes a block of hop names lease {lease}, and that is over"
            ):
                self.region.settle(lease, offset, nbytes)
        self.dead += lost
        self.worker()

    @precondition(lambda self: self.dead)
    @rule()
    def what_is_over_stays_over(self) -> None:
        for lease in self.dead[-3:]:
            with pytest.raises(LedgerError, match=f"frees a block of hop names lease {lease}"):
                self.region.release(lease)
            with pytest.raises(LedgerError, match=f"reads a block of hop names lease {lease}"):
                self.region.at(lease)

    @invariant()
    def nothing_is_written_over(self) -> None:
        gauge = self.region.gauge
        assert gauge.live == sum(self.sizes.values()) <= gauge.most
        assert gauge.live <= gauge.used <= gauge.size
        assert gauge.live <= gauge.high_water <= gauge.size
        assert 0 <= gauge.now()["fragmentation"] <= 1
        for lease, nbytes in self.sizes.items():
            at = self.region.at(lease).offset
            assert self.reader.view[at : at + nbytes] == bytes([lease % 256]) * nbytes

    def teardown(self) -> None:
        if not hasattr(self, "region"):
            return
        for lease in list(self.region.leases):
            self.region.release(lease)
        assert (self.region.gauge.live, self.region.gauge.used) == (0, 0)
        self.memory.close()


TestTwo = Two.TestCase
TestTwo.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# --- pages ---------------------------------------------------------------------------------------------------------


def test_an_arena_takes_the_pages_that_blocks_have_lain_in_and_no_more() -> None:
    size, count = 3 * CHUNK, 64
    with shared(size * count) as memory:
        own, fd = arena(memory), memory.fds["own"]
        desk = Desk(own, {"hop": Area(0, size, count)})
        assert _pages(fd) == 0, "address space, until something lies there"
        offset = desk.take("hop", size)
        assert _pages(fd) == own.resident == size
        desk.free({"hop": [offset]})
        for _ in range(100):
            desk.free({"hop": [desk.take("hop", size)]})
        assert _pages(fd) == size, "the lowest place is taken again, and its pages are there"
        small = [desk.take("hop", 1000) for _ in range(40)]
        assert _pages(fd) == size, "forty small blocks share the frame"
        assert len(set(small)) == 40


def test_a_kernel_that_cant_take_pages_at_once_gives_them_on_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowgraph.runtime.arena.MADV_POPULATE_WRITE", 99)
    with shared(CHUNK) as memory:
        desk = Desk(arena(memory), {"hop": Area(0, CHUNK, 1)})
        offset = desk.take("hop", CHUNK)
        assert _pages(memory.fds["own"]) == 0
        desk.arena.view[offset : offset + 3] = b"abc"
        assert arena(memory, "reader").view[offset : offset + 3] == b"abc"


def _pages(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("start", [0, 3 * CHUNK, LARGE + 64])
@pytest.mark.parametrize("is_allowed", [True, False])
def test_large_pages_change_neither_what_is_there_nor_how_much_is_taken(
    start: int, is_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may have none: then small ones are taken. Readers see the same, mapped before or after."""
    if not is_allowed:
        monkeypatch.setattr("flowgraph.runtime.pages.MADV_COLLAPSE", 99)
    size = 3 * LARGE + 100
    with shared(5 * LARGE) as memory:
        own, before = arena(memory), arena(memory, "reader")
        own.view[start + LARGE] = 7
        own.populate(start, size)
        chunks = -(-(start + size) // CHUNK) - start // CHUNK
        assert _pages(memory.fds["own"]) == own.resident == chunks * CHUNK
        content = bytes(range(1, 251)) * (size // 250)
        assert own.view[start + LARGE] == 7
        own.view[start : start + len(content)] = content
        for reader in (before, arena(memory, "reader")):
            assert reader.view[start : start + len(content)] == content
        own.populate(0, 5 * LARGE)
        assert own.view[start : start + len(content)] == content
        assert _pages(memory.fds["own"]) == own.resident == 5 * LARGE


def test_memory_of_a_file_begins_at_a_large_page_wherever_others_lie() -> None:
    with shared(4 * LARGE + 4096) as memory:
        held = []
        for n in (1, 3, 7, 513):
            held += [Arena(Pages(-1, n * 4096)), arena(memory)]
        assert [address(one.view) % LARGE for one in held[1::2]] == [0] * 4
        assert [len(one.view) for one in held[1::2]] == [4 * LARGE + 4096] * 4


def test_a_file_lasts_as_long_as_something_looks_at_it_and_no_longer() -> None:
    with shared(2 * LARGE) as memory:
        array = np.frombuffer(arena(memory).view, np.uint8)[-3:]
        array[:] = 5
        where = array.__array_interface__["data"][0]
        assert _is_mapped(where)
        assert arena(memory, "reader").view[-3:] == b"\5\5\5"
        del array
        assert not _is_mapped(where)


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        ranges = [line.split(" ", 1)[0].split("-") for line in lines if "flowgraph-own" in line]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
