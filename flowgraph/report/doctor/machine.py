"""What the machine gives to a run: cores, memory, descriptors, ports, and disk for models."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

from flowgraph.errors import Check
from flowgraph.limits import core_limit, memory_limit
from flowgraph.models.cache import cache_dir
from flowgraph.spec.units import counted, size_text

QUICKSTART = 5_000_000_000  # bytes: it peaks at 4.4 GB with a model of 135M parameters
FILES_LEAST, FILES_WELL = (
    256,
    1024,
)  # 64 connections to a server, an arena and pipes an owner; several servers
PORTS = 8  # one a server, and what its processes speak through
DISK = 2_000_000_000  # bytes: a small model, twice while it is converted


def cores() -> Check:
    """The cores that the scheduler lets this process have, and the time that its control group allows."""
    affects = "threads an owner; speed"
    usable, quota = len(os.sched_getaffinity(0)), core_limit()
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{usable} of {os.cpu_count()}" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    if quota is not None and quota < usable:
        fix = f"give the owners of the graph threads that sum to {max(1, int(quota))}, or raise the quota"
        return Check("cores", "warn", f"{found}; the control group allows {quota:.3g}", affects, fix)
    if usable == 1:
        fix = "give this process two cores, so that sampling and training don't wait for each other"
        return Check("cores", "warn", found, affects, fix)
    return Check("cores", "ok", found, affects)


def memory() -> Check:
    """What is available now; cached files give way. A control group's limit counts as if nothing of it were used."""
    affects = "the size of the model; an SGLang server takes 4 GB more"
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit()
    found = f"{size_text(free)} of {size_text(total)} available"
    if limit is not None and limit < total:
        found += f", and the control group allows {size_text(limit)}"
    if min(free, limit or free) < QUICKSTART:
        fix = (
            f"end what else runs, or give this process {size_text(QUICKSTART)}: the quickstart takes as much"
        )
        return Check("memory", "warn", found, affects, fix)
    return Check("memory", "ok", found, affects)


def descriptors() -> Check:
    """The limit of open files. It is the soft one that counts, and a process may raise it up to the hard one."""
    affects = "connections to servers (64 and more), arenas, pipes"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Check("open files", "ok", "no limit", affects)
    found = f"{soft} at most"
    if soft >= FILES_WELL:
        return Check("open files", "ok", found, affects)
    raised = hard == resource.RLIM_INFINITY or hard >= FILES_WELL
    fix = "ulimit -n 4096" if hard == resource.RLIM_INFINITY or hard >= 4096 else f"ulimit -n {hard}"
    if not raised:
        fix = "raise `nofile` in /etc/security/limits.conf, or start the container with --ulimit nofile=65536"
    return Check("open files", "fail" if soft < FILES_LEAST else "warn", found, affects, fix)


def ports() -> Check:
    """Listen on ports that the kernel chooses, and connect to one."""
    affects = "servers that flowgraph starts"
    try:
        with ExitStack() as stack:
            bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(PORTS)]
            stack.enter_context(socket.create_connection(bound[0].getsockname(), timeout=5))
    except OSError as error:
        found = f"can't listen on 127.0.0.1: {error.strerror or error}"
        return Check("ports", "fail", found, affects, "bring the loopback interface up: ip link set lo up")
    return Check("ports", "ok", f"{counted(PORTS, 'port')} of 127.0.0.1 bound at once", affects)


def model_cache() -> Check:
    """Whether a model can be written where models are kept. The directory is not made."""
    affects = "`flowgraph pull`, and the first run with a model"
    cache = cache_dir()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    try:
        _try_to_write(there)
    except OSError as error:
        fix = "set FLOWGRAPH_CACHE to a directory that you may write to"
        return Check("model cache", "fail", f"can't write {there}: {error.strerror}", affects, fix)
    usage = os.statvfs(there)
    free = usage.f_bavail * usage.f_frsize
    found = f"{cache}, {size_text(free)} free"
    if free < DISK:
        fix = f"free {size_text(DISK)} there, or set FLOWGRAPH_CACHE to a directory of a larger disk"
        return Check("model cache", "warn", found, affects, fix)
    return Check("model cache", "ok", found, affects)


def _try_to_write(folder: Path) -> None:
    """Raises OSError. One byte, in a file without a name: a full disk and a read-only one both show."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(b"x")
