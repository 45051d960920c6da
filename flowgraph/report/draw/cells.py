"""Where each hop stands: the ring folded into two rows, a longer one in rows that turn like a snake, else in layers."""

from __future__ import annotations

import math
from itertools import pairwise

from flowgraph.plan.plan import Plan
from flowgraph.report.draw.flow import Flow, main_path

Cell = tuple[int, int]  # row, column
SWEEPS = 6  # of ordering layers by their neighbours: more changes little
MOST = 8  # hops of a layer that stand in one row


def place(plan: Plan, flow: Flow, columns: int) -> tuple[dict[str, Cell], list[tuple[str, str]]]:
    """The cell of every hop, and the pairs (source, reader) of the main path, back edge included."""
    prefix, loop = main_path(flow)
    path = prefix + loop
    pairs = list(pairwise(path)) + ([(loop[-1], loop[0])] if loop else [])
    half = math.ceil(len(loop) / 2)
    two_rows = loop and len(prefix) + half <= columns
    cells = _fold(prefix, loop) if two_rows else _snake(path, columns)
    _place_others(plan, flow, cells, pairs, columns)
    return cells, pairs


def is_layered(flow: Flow) -> bool:
    """Whether it is no ring, and more than one chain."""
    return not main_path(flow)[1] and len(main_path(flow)[0]) < len(flow.order)


# --- layers ------------------------------------------------------------------------------------------------------


def layers(flow: Flow) -> dict[str, Cell]:
    """A row for each layer: a hop stands below all that it reads, as near to them as the others let it.

    Layers by longest path and their order by the mean place of the neighbours (Sugiyama et al. 1981). A layer of more
    than MOST hops takes several rows.
    """
    depth: dict[str, int] = {}
    for name in flow.order:
        depth[name] = 1 + max((depth[source] for source in flow.before[name]), default=-1)
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name in flow.order:
        rows[depth[name]].append(name)
    _order(rows, flow)
    split = [row[i : i + MOST] for row in rows for i in range(0, len(row), MOST)]
    return _columns(split, flow)


def _order(rows: list[list[str]], flow: Flow) -> None:
    """Sort each row by the mean place of what its hops read, then upward of what reads them, and so on."""
    after: dict[str, list[str]] = {name: [] for name in flow.order}
    for name, sources in flow.before.items():
        for source in sources:
            after[source].append(name)
    at = {name: i / max(1, len(row) - 1) for row in rows for i, name in enumerate(row)}
    for sweep in range(SWEEPS):
        near = flow.before if sweep % 2 == 0 else after
        for row in rows if sweep % 2 == 0 else reversed(rows):
            mean = {name: _mean([at[n] for n in near[name]], at[name]) for name in row}
            row.sort(key=mean.__getitem__)  # stable, so equal ones keep their order
            at |= {name: i / max(1, len(row) - 1) for i, name in enumerate(row)}


def _columns(rows: list[list[str]], flow: Flow) -> dict[str, Cell]:
    """In each row from left to right the column nearest to the middle of what a hop reads, none twice."""
    widest = max(map(len, rows), default=0)
    cells: dict[str, Cell] = {}
    for r, row in enumerate(rows):
        wanted = [
            _mean([cells[n][1] for n in flow.before[name] if n in cells], (widest - len(row)) / 2 + i)
            for i, name in enumerate(row)
        ]
        column = -1
        for i, name in enumerate(row):
            last = widest - (len(row) - i)  # leaves room for those to the right
            column = min(last, max(column + 1, round(wanted[i] - 0.01)))
            cells[name] = (r, column)
    return cells


def _mean(values: list[float] | list[int], default: float) -> float:
    return sum(values) / len(values) if values else default


# --- the ring ----------------------------------------------------------------------------------------------------


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


def _place_others(
    plan: Plan, flow: Flow, cells: dict[str, Cell], pairs: list[tuple[str, str]], columns: int
) -> None:
    """A hop off the main path takes the free cell nearest to what it reads (else to what reads it)."""
    near: dict[str, list[str]] = {name: [] for name in flow.order}
    for one in plan.seams:
        near.get(one.reader, []).append(one.source)
    for one in plan.seams:
        near.get(one.source, []).append(one.reader)
    taken = set(cells.values()) | {cell for a, b in pairs for cell in _between(cells[a], cells[b])}
    bottom = max((r for r, _ in cells.values()), default=-1) + 1
    for name in flow.order:
        if name not in cells:
            start = next((cells[n] for n in near[name] if n in cells), (0, 0))
            cells[name] = _nearest(start, taken, bottom, columns)
            taken.add(cells[name])
            bottom = max(bottom, cells[name][0] + 1)


def _nearest(start: Cell, taken: set[Cell], bottom: int, columns: int) -> Cell:
    """The free cell at the least distance, where a row counts a little more than a column; of equal ones the first."""
    row, column = start
    best: tuple[float, Cell] | None = None
    for step in range(bottom + 1):
        if best is not None and 1.2 * step > best[0]:
            break
        for r in {row - step, row + step}:
            for c in range(columns) if 0 <= r <= bottom else ():
                found = (1.2 * step + abs(c - column), (r, c))
                if (r, c) not in taken and (best is None or found < best):
                    best = found
    assert best is not None, "the row below all others is free"
    return best[1]


def _between(a: Cell, b: Cell) -> list[Cell]:
    """The cells that a straight line from a to b in one row crosses."""
    if a[0] != b[0]:
        return []
    return [(a[0], c) for c in range(min(a[1], b[1]) + 1, max(a[1], b[1]))]
