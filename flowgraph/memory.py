"""How much memory there is to take: engines ask before they stage weights, the runtime before it makes its arenas."""

from __future__ import annotations

from pathlib import Path

# Where a control group says its limit and what it uses, and which field of memory.stat gives way: version 2, version 1.
FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this machine has, and the control group allows. Cached files give way, so they are not counted."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for limit, current, stat, field in FILES:
        try:
            most = (cgroup / limit).read_text().strip()
            used = int((cgroup / current).read_text())
            cached = int(dict(line.split() for line in (cgroup / stat).read_text().splitlines())[field])
        except (OSError, KeyError):
            continue
        return free if most == "max" else min(free, int(most) - used + cached)
    return free
