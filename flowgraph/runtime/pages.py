"""Memory pages of arenas: taken before they are used and, where there is much to take, 2 MB each.

A page of 4 KB costs a fault, and a look-up whenever a reader comes to it; on a virtual machine these look-ups take as
long as the reading. The kernel gives large pages of shared memory to who asks for them (MADV_COLLAPSE, Linux 6.1),
whatever its settings, where file and address agree on their boundaries. Without them all works, more slowly.
"""

from __future__ import annotations

import mmap

import numpy as np

MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25  # Linux 5.14 and 6.1; Python has no names for them
LARGE = 1 << 21


def mapped(fd: int, size: int, prot: int) -> mmap.mmap:
    """A shared mapping of a file (-1: of none) that begins at a large page's boundary, if the kernel lets it."""
    memory = mmap.mmap(fd, size, prot=prot)
    over = address(memory) % LARGE
    if size < LARGE or not over:
        return memory
    memory.close()
    above = mmap.mmap(-1, over)  # the kernel places the next mapping right below
    try:
        return mmap.mmap(fd, size, prot=prot)
    finally:
        above.close()


def address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def take_large(memory: mmap.mmap, start: int, end: int) -> bool:
    """Have this range, which begins and ends at boundaries of large pages, in such pages. False when there are none.

    A large page needs a small one to grow from. What is there stays.
    """
    try:
        for at in range(start, end, LARGE):
            memory.madvise(MADV_POPULATE_WRITE, at, mmap.PAGESIZE)
        memory.madvise(MADV_COLLAPSE, start, end - start)
    except OSError:
        return False
    return True
