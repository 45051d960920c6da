"""One full copy of the newest weights, in memory that a server on this host loads as if it were on disk.

A server that is replaced, or that missed an update, is brought to the current version from here, whatever the trainer
has written since. The memory is a `memfd`: it has no name in /dev/shm, and the kernel frees it with its last holder,
however this process ends. What has a name is a symbolic link to the descriptor, in a directory of its own:

    <directory>/model.safetensors -> /proc/<pid>/fd/<n>

Whoever opens that path gets the memory itself, so a reader must run on this host, as this user, in this process's
process namespace. SGLang 0.5.23 doesn't refuse a path that it can't open, it ends: keep the stage open while a server
may be told to load it. Nothing holds a reader off while `write` runs: that order is the caller's to keep.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from flowgraph.engines.weights.checksum import bits
from flowgraph.engines.weights.layout import Entry, check_same, header, views
from flowgraph.errors import MemoryShort
from flowgraph.limits import available

FILE = "model.safetensors"


class Stage:
    """Room for one set of weights, allocated once and refilled in place.

    table: names, dtypes and shapes of the set. parent: where the directory is made, and removed by `close`.
    tensors: writable views, name → tensor; zeros at first. directory: what a server is given as its model path; it
    holds the weights and nothing else. nbytes: of the file.
    version: of what the tensors hold; None before the first `write` and inside one. Who writes to the views instead
    (a delta, say) sets it.

    Raises MemoryShort with both sizes when the machine can't hold it, ValueError for a table that no file can have.
    """

    def __init__(self, table: Iterable[Entry], parent: str | os.PathLike[str]) -> None:
        start, self.nbytes = header(table)
        self._fd = _allocate(self.nbytes)
        memory = mmap.mmap(self._fd, self.nbytes)
        memory[: len(start)] = start
        self.tensors, _ = views(memory)
        self.version: int | None = None
        self.directory = tempfile.mkdtemp(prefix="weights-", dir=parent)
        os.symlink(f"/proc/{os.getpid()}/fd/{self._fd}", Path(self.directory, FILE))

    def write(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy every tensor in; then the stage holds `version`.

        Raises ValueError naming the first tensor that is missing, unknown, or of another shape or dtype; then
        nothing has changed. RuntimeError when closed.
        """
        if self._fd < 0:
            raise RuntimeError("the stage is closed")
        check_same(self.tensors, tensors)
        self.version = None
        for name, target in self.tensors.items():
            # By numpy: torch splits each copy among its threads, and on a busy machine waits for each of them.
            bits(target)[...] = bits(tensors[name])
        self.version = version

    def close(self) -> None:
        """Remove the directory and give the memory back, once the last view and the last reader are gone too.

        Harmless when repeated.
        """
        if self._fd < 0:
            return
        Path(self.directory, FILE).unlink(missing_ok=True)
        if os.path.isdir(self.directory):
            os.rmdir(self.directory)
        os.close(self._fd)
        self._fd, self.version, self.tensors = -1, None, {}


def _allocate(nbytes: int) -> int:
    """A memfd whose pages are all there, so that no write to it can fail later."""
    free = available()
    if nbytes > free:
        raise _short(nbytes, free)
    fd = os.memfd_create("flowgraph-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise _short(nbytes, available()) from error
    return fd


def _short(nbytes: int, free: int) -> MemoryShort:
    return MemoryShort(
        f"a copy of the weights takes {nbytes / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB of memory are available",
        "take a smaller model or dtype, or fewer engines on this machine",
    )
