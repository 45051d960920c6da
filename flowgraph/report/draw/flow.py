"""What a picture goes by: which hop comes before which, and the longest way that the ring closes.

Everything follows from the seams: a forward seam hands on payload or rows, and the back edge is the one with a delay.
No hop is known by its name.
"""

from __future__ import annotations

import heapq

import msgspec

from flowgraph.plan.plan import Plan
from flowgraph.report.draw.labels import is_forward


class Flow(msgspec.Struct, frozen=True):
    """order: every hop after those that it reads; before: hop → its sources along forward seams, in that order.

    back: (source, reader) of the seams with a delay
    """

    order: tuple[str, ...]
    before: dict[str, tuple[str, ...]]
    back: tuple[tuple[str, str], ...]


def flow_of(plan: Plan) -> Flow:
    """Of hops that could stand next, the first in the file does; a cycle without a delay is cut at such a one."""
    place = {name: i for i, name in enumerate(plan.hops)}
    before: dict[str, dict[str, None]] = {name: {} for name in plan.hops}
    after: dict[str, list[str]] = {name: [] for name in plan.hops}
    for seam in plan.seams:
        new = seam.source != seam.reader and seam.source not in before.get(seam.reader, {})
        if is_forward(plan, seam) and seam.source in place and seam.reader in place and new:
            before[seam.reader][seam.source] = None
            after[seam.source].append(seam.reader)
    order = _topological(list(plan.hops), {name: len(sources) for name, sources in before.items()}, after)
    at = {name: i for i, name in enumerate(order)}
    earlier = {
        name: tuple(source for source in sources if at[source] < at[name]) for name, sources in before.items()
    }
    back = tuple((s.source, s.reader) for s in plan.seams if s.delay and s.source in at and s.reader in at)
    return Flow(tuple(order), earlier, back)


def _topological(names: list[str], waits: dict[str, int], after: dict[str, list[str]]) -> list[str]:
    place = {name: i for i, name in enumerate(names)}
    ready = [place[name] for name in names if not waits[name]]
    heapq.heapify(ready)
    done: dict[str, None] = {}
    first = 0  # every hop of the file before this one is done
    while len(done) < len(names):
        if not ready:
            while names[first] in done:
                first += 1
            ready = [first]
        name = names[heapq.heappop(ready)]
        if name in done:
            continue
        done[name] = None
        for reader in after[name]:
            waits[reader] -= 1
            if not waits[reader] and reader not in done:
                heapq.heappush(ready, place[reader])
    return list(done)


def main_path(flow: Flow) -> tuple[list[str], list[str]]:
    """(what leads to the ring, the ring). Without a back edge: (the longest way, nothing)."""
    best: tuple[list[str], list[str]] = ([], [])
    for source, reader in dict.fromkeys(flow.back):
        loop = _longest(flow, start=reader, end=source)
        if len(loop) > max(1, len(best[1])):
            best = (_longest(flow, end=reader)[:-1], loop)
    return best if best[1] else (_longest(flow), [])


def _longest(flow: Flow, start: str = "", end: str = "") -> list[str]:
    """The longest path by hops from `start` to `end`, "" for anywhere; of equal ones the first."""
    length: dict[str, int] = {}
    came: dict[str, str] = {}
    for name in flow.order:
        ways = [source for source in flow.before[name] if source in length]
        if name == start or (not start and not ways):
            length[name] = 1
        elif ways and name != start:
            came[name] = max(ways, key=length.__getitem__)
            length[name] = length[came[name]] + 1
    at = end if end else max(length, key=length.__getitem__, default="")
    path = [at] if at in length else []
    while path and path[-1] in came:
        path.append(came[path[-1]])
    return path[::-1]
