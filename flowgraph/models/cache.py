"""The cache directory, and a lock so that several processes may fill it at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flowgraph.errors import ModelError

LOCK_DEADLINE = 1800.0  # seconds: longer than a slow download and a conversion together


def cache_dir() -> Path:
    """$FLOWGRAPH_CACHE, else $XDG_CACHE_HOME/flowgraph, else ~/.cache/flowgraph. Nothing is created."""
    if own := os.environ.get("FLOWGRAPH_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "flowgraph"


@contextlib.contextmanager
def locked(
    path: Path, *, deadline: float = LOCK_DEADLINE, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; wait at most `deadline` seconds for its holder.

    The kernel drops the lock with the process that held it, so a killed pull blocks nobody. `on_wait` is
    called once if another process holds it. Raises ModelError when the deadline passes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        end, waited = time.monotonic() + deadline, False
        while not _try_lock(file.fileno()):
            if not waited:
                waited = True
                on_wait()
            if time.monotonic() >= end:
                raise ModelError(
                    f"{path} is still held by another process after {deadline:.0f} s",
                    "wait for the other flowgraph process that pulls this model, or end it",
                )
            time.sleep(0.1)  # flock has no timeout of its own
        yield  # closing the file releases the lock


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_tree(directory: Path) -> None:
    """Flush a directory's files to the disk, so that a rename which survives a crash names whole files."""
    for path in [*directory.iterdir(), directory]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
