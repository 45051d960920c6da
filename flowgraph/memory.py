"""How much memory there is to take: engines ask before they stage weights, the runtime before it makes its arenas."""

from __future__ import annotations

from pathlib import Path


def available(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this machine has, and the control group allows. Cached files give way, so they are not counted."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        limit, used = (
            (cgroup / "memory.max").read_text().strip(),
            int((cgroup / "memory.current").read_text()),
        )
        fields = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = int(fields["inactive_file"])
        return free if limit == "max" else min(free, int(limit) - used + cached)
    except (OSError, KeyError):
        return free
