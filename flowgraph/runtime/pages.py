"""Memory pages of arenas: taken before they are used and, where there is much to take, 2 MB each.

A page of 4 KB costs a fault, and a look-up whenever a reader comes to it; on a virtual machine these look-ups take as
long as the reading. The kernel gives large pages of shared memory to who asks for them (MADV_COLLAPSE, Linux 6.1),
whatever its settings, where file and address agree on their boundaries. Without them all works, more slowly.
"""

from __future__ import annotations

import ctypes
import mmap
import os

MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25  # Linux 5.14 and 6.1; Python has no names for them
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
LARGE = 1 << 21


class Pages:
    """Shared memory as this process sees it: a file's, from a boundary of large pages on, or with fd -1 its own.

    view: all of it. It lasts for as long as something looks at it
    """

    def __init__(self, fd: int, size: int, *, writable: bool = True) -> None:
        self.at = 0
        if fd < 0 or size < LARGE:
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self.map = mmap.mmap(fd, size, prot=prot)
        else:
            self.map, self.at = _aligned(fd, size, writable=writable)
        view = memoryview(self.map)[self.at : self.at + size]
        self.view = view if writable else view.toreadonly()

    def __len__(self) -> int:
        return len(self.view)

    def advise(self, option: int, start: int, nbytes: int) -> None:
        """madvise. Raises OSError."""
        self.map.madvise(option, self.at + start, nbytes)

    def take_large(self, start: int, end: int) -> bool:
        """Have this range, which begins and ends at boundaries, in large pages. False when there are none.

        A large page needs a small one to grow from. What is there stays.
        """
        try:
            for at in range(start, end, LARGE):
                self.advise(MADV_POPULATE_WRITE, at, mmap.PAGESIZE)
            self.advise(MADV_COLLAPSE, start, end - start)
        except OSError:
            return False
        return True


def address(view: memoryview | mmap.mmap) -> int:
    """Of memory that may be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _aligned(fd: int, size: int, *, writable: bool) -> tuple[mmap.mmap, int]:
    """A mapping and where in it the file begins: address space with room for that, whose middle the file replaces.

    The kernel places a file where it likes, and Python can't say where, but unmaps all of it once nobody looks.
    """
    room = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    at = -address(room) % LARGE
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    placed = _libc().mmap(address(room) + at, size, prot, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    if placed != address(room) + at:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return room, at


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    ]  # fmt: skip
    return libc
