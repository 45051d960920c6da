"""What the control groups of this process allow, by either version of the kernel's interface.

Engines ask how much memory there is before they stage weights, the runtime before it makes its arenas.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # bytes: version 1 says no limit by a number near 2**63


# Version 2, version 1: what a group uses, and the field of memory.stat that counts cached files, which give way.
USE = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}


def available(root: Path = ROOT, own: Path = OWN) -> int:
    """Bytes that this machine has, and that this group and those around it still allow."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for group, name in _files("memory", "memory.limit_in_bytes", "memory.max", root, own):
        current, cached = USE[name]
        limit, used = _text(group / name), _text(group / current)
        stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        if limit.isdigit() and int(limit) < UNLIMITED and used.isdigit():
            free = min(free, max(0, int(limit) - int(used) + int(stat.get(cached, 0))))
    return free


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """The least limit in bytes of this group and those around it, or None."""
    read = [
        _text(group / name)
        for group, name in _files("memory", "memory.limit_in_bytes", "memory.max", root, own)
    ]
    limits = [int(text) for text in read if text.isdigit() and int(text) < UNLIMITED]
    return min(limits, default=None)


def core_limit(root: Path = ROOT, own: Path = OWN) -> float | None:
    """How many cores' time this group may take, or None."""
    shares = []
    for group, name in _files("cpu", "cpu.cfs_quota_us", "cpu.max", root, own):
        text = _text(group / name)
        if name == "cpu.cfs_quota_us":
            text += f" {_text(group / 'cpu.cfs_period_us')}"
        match text.split():
            case [quota, period] if quota.isdigit() and period.isdigit():
                shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _files(controller: str, v1: str, v2: str, root: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """The directories of a controller from this process's group up to the root, with the name of the file there.

    In a container the group's path may be that of the host, of which only the root is there.
    """
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = root, v2
        elif controller in controllers.split(","):
            base, name = root / controllers, v1
        else:
            continue
        group = base / path.lstrip("/")
        yield from ((folder, name) for folder in (group, *group.parents) if folder.is_relative_to(base))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
