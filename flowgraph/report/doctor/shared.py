"""Shared memory, of both kinds: without a name, for the arenas, and files in /dev/shm."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

from flowgraph.errors import Check
from flowgraph.spec.units import size_text

SHM = Path("/dev/shm")
SHM_WELL = (
    1_000_000_000  # bytes: the weights of 135M parameters in float32 are 0.54 GB, and two versions may meet
)
SHM_FIX = "mount -o remount,size=8G /dev/shm; a container is started with --shm-size=8g"


def memfd() -> Check:
    """Make one, write through one mapping, and read through another."""
    affects = "every run: payloads cross in such memory"
    try:
        fd = os.memfd_create("flowgraph-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as one, mmap.mmap(fd, mmap.PAGESIZE) as other:
                one[:4] = b"flow"
                crossed = other[:4] == b"flow"
        finally:
            os.close(fd)
    except OSError as error:
        fix = "allow memfd_create: in a container, by its seccomp profile"
        return Check("memfd", "fail", f"can't be made: {error.strerror}", affects, fix)
    assert crossed, "two mappings of one file show the same bytes"
    return Check("memfd", "ok", "made, mapped twice and shared", affects)


def shm(folder: Path = SHM) -> Check:
    """The size and what is free of it; a file is made there."""
    affects = "weight sync to SGLang; torch's data between processes"
    try:
        with tempfile.TemporaryFile(dir=folder):
            usage = os.statvfs(folder)
    except OSError as error:
        return Check(str(folder), "fail", f"can't be written: {error.strerror}", affects, SHM_FIX)
    free, size = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
    found = f"{size_text(free)} of {size_text(size)} free"
    if free < SHM_WELL:
        return Check(str(folder), "warn", found, affects, SHM_FIX)
    return Check(str(folder), "ok", found, affects)
