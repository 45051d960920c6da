"""Memory whose pages go back to the system and are taken again, while its addresses stay what they are."""

from __future__ import annotations

import errno
import math
import mmap

import torch
from torch import Tensor

MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


class PageMemory:
    """An anonymous private mapping of at least `size` bytes, on a page boundary, all zero at first.

    `release` gives its physical pages back to the system; the mapping, its address and all tensors in it
    stay valid. `resume` takes pages again, and they are zero. A tensor keeps the mapping alive. Whoever
    touches a tensor while the pages are released gets zeros or takes pages early; it is the owner who
    must refuse that. A process that was forked meanwhile holds pages of its own.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a mapping has at least 1 byte, not {size}")
        self.size = math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapping = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Part of a huge page isn't free before the rest of it is, and these sped up no decode step.
        advise_if_known(self._mapping, mmap.MADV_NOHUGEPAGE)
        self._released = True
        self.resume()

    @property
    def released(self) -> bool:
        return self._released

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of the first bytes; ValueError where they don't suffice."""
        return torch.frombuffer(self._mapping, dtype=dtype, count=math.prod(shape)).view(shape)

    def release(self) -> int:
        """Forget the contents; returns the bytes given back, 0 if they were already.

        OSError where the system locks all memory of the process (mlockall): such pages can't be given back.
        """
        if self._released:
            return 0
        self._mapping.madvise(mmap.MADV_DONTNEED)
        self._released = True
        return self.size

    def resume(self) -> None:
        """Take all pages now: not one by one in a decode step, where each unwritten one would fault twice.

        A kernel that can't do this gives each page on its first use. OSError where there is no memory to
        take: it stays released, and may be resumed later.
        """
        if self._released:
            advise_if_known(self._mapping, MADV_POPULATE_WRITE)
            self._released = False


def advise_if_known(mapping: mmap.mmap, advice: int) -> bool:
    """madvise for the whole mapping; False from a kernel that doesn't know this advice."""
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
