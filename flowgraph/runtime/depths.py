"""How deep the ring's queues are: what waits makes what is trained on older."""

from __future__ import annotations

from typing import NamedTuple


class Depths(NamedTuple):
    """Trajectories in flight and ready, and batches that wait to be trained."""

    in_flight: int = 0
    ready: int = 0
    queued: int = 0


class Span:
    """Depths over a time: of each the mean over that time, and the most."""

    def __init__(self, now: float, depths: Depths) -> None:
        self.began = self.since = now
        self.depths = self.most = depths
        self.area = [0.0, 0.0, 0.0]

    def set(self, now: float, depths: Depths) -> None:
        """What the depths are from now on."""
        took = now - self.since
        self.area = [area + depth * took for area, depth in zip(self.area, self.depths, strict=True)]
        self.since, self.depths = now, depths
        self.most = Depths(*map(max, self.most, depths))

    def told(self, now: float) -> dict[str, dict[str, float]]:
        """Name → mean and max."""
        self.set(now, self.depths)
        took = max(1e-9, now - self.began)
        return {
            name: {"mean": round(area / took, 3), "max": most}
            for name, area, most in zip(Depths._fields, self.area, self.most, strict=True)
        }
