"""A region of an arena, cut up by size class: `count` frames, each halved as often as a block is smaller than it.

A block lies in one frame. So as long as fewer than `count` blocks are alive at least one frame is empty, and its halves
are whole again: a block of the largest size always has a place, whatever the sizes and the order of what came before.
"""

from __future__ import annotations

from bisect import bisect_left, insort

SMALLEST = (
    4096  # bytes of the smallest class, or a little more: a page. Frames below two of them are never cut
)
ALIGN = 64  # every block starts on a cache line


class Buddy:
    """Blocks of one region. Of the places that suffice the smallest is taken, and of those the lowest: runs repeat.

    levels: how often a frame can be halved; unit: bytes of the smallest class
    free: level → offsets of free pieces, rising; live: offset of a block → its level
    A frame is a little larger than 2^levels units where its size is no multiple of that.
    """

    def __init__(self, base: int, size: int, count: int) -> None:
        self.base, self.size, self.count = base, size, count
        self.levels = max(0, (size // SMALLEST).bit_length() - 1)
        self.unit = (size >> self.levels) // ALIGN * ALIGN
        self.free: list[list[int]] = [[base + i * size for i in range(count)]]
        self.free += [[] for _ in range(self.levels)]
        self.live: dict[int, int] = {}

    @property
    def whole(self) -> int:
        """Frames that hold nothing."""
        return len(self.free[0])

    def bytes_at(self, level: int) -> int:
        return self.unit << (self.levels - level) if level else self.size

    def allocate(self, nbytes: int) -> int:
        """The offset of a block of at least `nbytes`. There is one when fewer than `count` are alive."""
        wanted = self._level(nbytes)
        level = next((one for one in range(wanted, -1, -1) if self.free[one]), None)
        assert level is not None, f"{len(self.live)} blocks are alive, and there is room for {self.count}"
        offset = self.free[level].pop(0)
        self._halve(offset, level, wanted)
        return offset

    def trim(self, offset: int, nbytes: int) -> None:
        """The block at `offset` needs no more than `nbytes`: what lies behind is free at once."""
        level = self.live[offset]
        self._halve(offset, level, max(level, self._level(nbytes)))

    def release(self, offset: int) -> None:
        """The block at `offset` is free, and one piece with the halves beside it that are."""
        level = self.live.pop(offset)
        while level and self._take(level, twin := self._twin(offset, level)):
            offset = min(offset, twin)
            level -= 1
        insort(self.free[level], offset)

    def occupy(self, offset: int, nbytes: int) -> None:
        """Take just this place, which an earlier allocator of the same region gave to a block of `nbytes`."""
        wanted, level, start = self._level(nbytes), 0, self._frame(offset)
        while not self._take(level, start):
            assert level < wanted, f"a block lies at {offset} already"
            level += 1
            start = offset - (offset - self._frame(offset)) % self.bytes_at(level)
        while level < wanted:
            level += 1
            half = start + self.bytes_at(level)
            start, other = (half, start) if offset >= half else (start, half)
            insort(self.free[level], other)
        assert start == offset, f"no block of {nbytes} B begins at {offset}"
        self.live[offset] = wanted

    def _level(self, nbytes: int) -> int:
        """The smallest class that such a block fits into."""
        assert nbytes <= self.size, f"a block of {nbytes} B is larger than a frame of {self.size} B"
        units = -(-max(1, nbytes) // max(1, self.unit))
        return max(0, self.levels - (units - 1).bit_length())

    def _halve(self, offset: int, level: int, wanted: int) -> None:
        """A block keeps the first part of the piece at `offset`; the other halves are free."""
        self.live[offset] = wanted
        while level < wanted:
            level += 1
            insort(self.free[level], offset + self.bytes_at(level))

    def _frame(self, offset: int) -> int:
        return offset - (offset - self.base) % self.size

    def _twin(self, offset: int, level: int) -> int:
        frame, size = self._frame(offset), self.bytes_at(level)
        return frame + (((offset - frame) // size) ^ 1) * size

    def _take(self, level: int, offset: int) -> bool:
        """Take this very piece, if it is free."""
        pieces = self.free[level]
        at = bisect_left(pieces, offset)
        if at == len(pieces) or pieces[at] != offset:
            return False
        del pieces[at]
        return True
