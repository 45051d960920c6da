"""Where each hop stands: the ring folded into two rows, anything else in rows that turn like a snake.

Everything follows from the seams: the back edge is the one with a delay, and the ring is the longest way
along payload and rows that it closes. No hop is known by its name.
"""

from __future__ import annotations

import math
from itertools import pairwise

from flowgraph.plan.plan import Plan
from flowgraph.report.draw.labels import is_forward

Cell = tuple[int, int]  # row, column


def place(plan: Plan, columns: int) -> tuple[dict[str, Cell], list[tuple[str, str]]]:
    """The cell of every hop, and the pairs (source, reader) of the main path, back edge included."""
    prefix, loop = main_path(plan)
    half = math.ceil(len(loop) / 2)
    two_rows = loop and len(prefix) + half <= columns
    cells = _fold(prefix, loop) if two_rows else _snake(prefix + loop, columns)
    path = prefix + loop
    pairs = list(pairwise(path))
    if loop:
        pairs.append((loop[-1], loop[0]))
    _place_others(plan, cells, pairs, columns)
    return cells, pairs


def main_path(plan: Plan) -> tuple[list[str], list[str]]:
    """(what leads to the ring, the ring). Without a back edge: (the longest way, nothing)."""
    order = _order(plan)
    edges = _forward(plan, order)
    best: tuple[list[str], list[str]] = ([], [])
    for seam in plan.seams:
        if seam.delay and seam.source in order and seam.reader in order:
            loop = _longest(order, edges, start=seam.reader, end=seam.source)
            if len(loop) > max(1, len(best[1])):
                best = (_longest(order, edges, end=seam.reader)[:-1], loop)
    return best if best[1] else (_longest(order, edges), [])


def _order(plan: Plan) -> list[str]:
    """Topological order along forward seams; a cycle without a delay is cut at its first hop in the file."""
    waits = {
        name: {s.source for s in plan.seams if s.reader == name and is_forward(plan, s)} for name in plan.hops
    }
    order: list[str] = []
    while waits:
        known = [name for name in waits if not waits[name] & set(waits) - {name}]
        name = next(iter(known or waits))
        order.append(name)
        del waits[name]
    return order


def _forward(plan: Plan, order: list[str]) -> dict[str, list[str]]:
    """Reader → its sources, along forward seams that agree with the order."""
    at = {name: i for i, name in enumerate(order)}
    edges: dict[str, list[str]] = {name: [] for name in order}
    for seam in plan.seams:
        if is_forward(plan, seam) and at.get(seam.source, len(at)) < at.get(seam.reader, -1):
            edges[seam.reader].append(seam.source)
    return edges


def _longest(order: list[str], edges: dict[str, list[str]], start: str = "", end: str = "") -> list[str]:
    """The longest path by hops from `start` to `end`, "" for anywhere; of equal ones the first."""
    paths: dict[str, list[str]] = {}
    for name in order:
        ways = [paths[source] for source in edges[name] if source in paths]
        if name == start or (not start and not ways):
            paths[name] = [name]
        elif ways and name != start:
            paths[name] = [*max(ways, key=len), name]
    if end:
        return paths.get(end, [])
    return max(paths.values(), key=len, default=[])


def _fold(prefix: list[str], loop: list[str]) -> dict[str, Cell]:
    """Two rows. The ring's last hop stands below its first, so that the back edge is one short vertical."""
    half = math.ceil(len(loop) / 2)
    cells = {name: (0, c) for c, name in enumerate(prefix + loop[:half])}
    last = len(prefix) + half - 1
    cells |= {name: (1, last - i) for i, name in enumerate(loop[half:])}
    cells[loop[-1]] = (1, len(prefix))
    return cells


def _snake(path: list[str], columns: int) -> dict[str, Cell]:
    """Rows of equal length, left to right and back in turn."""
    rows = max(1, math.ceil(len(path) / columns))
    width = math.ceil(len(path) / rows) if path else 1
    cells = {}
    for i, name in enumerate(path):
        row, at = divmod(i, width)
        cells[name] = (row, at if row % 2 == 0 else width - 1 - at)
    return cells


def _place_others(plan: Plan, cells: dict[str, Cell], pairs: list[tuple[str, str]], columns: int) -> None:
    """A hop off the main path takes the free cell nearest to what it reads (else to what reads it)."""
    blocked = {cell for a, b in pairs for cell in _between(cells[a], cells[b])}
    for name in _order(plan):
        if name in cells:
            continue
        near = [s.source for s in plan.seams if s.reader == name] + [
            s.reader for s in plan.seams if s.source == name
        ]
        row, column = next((cells[n] for n in near if n in cells), (0, 0))
        bottom = max((r for r, _ in cells.values()), default=-1) + 1
        taken = set(cells.values()) | blocked
        free = [(r, c) for r in range(bottom + 1) for c in range(columns) if (r, c) not in taken]
        cells[name] = min(free, key=lambda cell: (1.2 * abs(cell[0] - row) + abs(cell[1] - column), cell))


def _between(a: Cell, b: Cell) -> list[Cell]:
    """The cells that a straight line from a to b in one row crosses."""
    if a[0] != b[0]:
        return []
    return [(a[0], c) for c in range(min(a[1], b[1]) + 1, max(a[1], b[1]))]
