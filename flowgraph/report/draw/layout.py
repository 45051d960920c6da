"""Positions: a plan becomes boxes, lines and labels that don't overlap; the same plan, the same picture."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import msgspec

from flowgraph.plan.plan import Plan, Seam
from flowgraph.report.audit.rows import Audit
from flowgraph.report.draw import route
from flowgraph.report.draw.cells import is_layered, layers, place
from flowgraph.report.draw.flow import Flow, flow_of, main_path
from flowgraph.report.draw.labels import EdgeText, edge_text, node_text
from flowgraph.report.draw.route import Edge, Item
from flowgraph.report.draw.shapes import (
    CLEAR,
    LINE,
    SIZE,
    EdgeLine,
    Label,
    LabelText,
    NodeBox,
    Picture,
    Point,
    around,
    beside,
    label_text,
    small_text,
    tall,
)
from flowgraph.report.draw.text import text_width

WIDTH = 1100.0  # what a README or a laptop shows without scrolling
EDGE = 16.0  # margin
NAME = 13.0  # font size of a hop's name
HEAD = 24.0  # height of a node's head
NARROWEST, WIDEST = 90.0, 150.0  # of a node, and of the gap for a label
LONGEST = 230.0  # of a label that has a track of its own
LANE = 12.0  # between lines in a gutter
BESIDE = 44.0  # between two hops of a layer
CORRIDOR = 110.0  # the same where lines pass between them, beside what hangs over the hops
PLACES = 40  # that are tried for a label on its track
Stub = tuple[float, float, float]  # a vertical piece of a line: x, from y, to y
MIN_CHANNEL = 34.0  # between two rows that nothing runs between


class Grid:
    """The columns and rows of one picture, and everything measured from them."""

    def __init__(self, plan: Plan, audit: Audit) -> None:
        rows = {(r.source, r.reader): r for r in audit.seams}
        self.plan = plan
        self.texts = {name: node_text(plan, hop) for name, hop in plan.hops.items()}
        self.seams = [s for s in plan.seams if s.source in plan.hops and s.reader in plan.hops]
        self.edge_texts = [edge_text(plan, s, rows[s.source, s.reader]) for s in self.seams]
        self.node_w = _clamp(10 + max((self._node_width(n) for n in self.texts), default=0))
        self.lines = max((len(t.lines) for t in self.texts.values()), default=0)
        flow = flow_of(plan)
        self.layered = is_layered(flow)
        if self.layered:
            # Between hops of a layer run lines and no labels.
            self.cells = layers(flow)
            apart = [abs(self.cells[s.source][0] - self.cells[s.reader][0]) for s in self.seams]
            self.gap = CORRIDOR if max(apart, default=0) > 1 else BESIDE
            self.pairs: list[tuple[str, str]] = []
        else:
            self._in_rows(flow)
        self.rows = max((r for r, _ in self.cells.values()), default=-1) + 1
        self.centre = {n: c * (self.node_w + self.gap) + self.node_w / 2 for n, (_, c) in self.cells.items()}
        # A label over and under a straight edge is no higher than the hops that it stands between.
        labels = [label_text(t, WIDEST, split=True) for t in self.edge_texts if t.line != "dotted"]
        lines = max((max(len(one.above), len(one.below)) for one in labels), default=2)
        self.node_h = max(HEAD + self.lines * LINE + 10, 2 * (lines * LINE + CLEAR + 4))

    def _in_rows(self, flow: Flow) -> None:
        """The ring in two rows, when they can be made to fit; else in rows that turn."""
        prefix, loop = main_path(flow)
        on_path = set(pairwise(prefix + loop))
        texts = zip(self.seams, self.edge_texts, strict=True)
        short = [t for s, t in texts if (s.source, s.reader) in on_path]
        self.gap = _clamp(10 + max((label_text(t, WIDEST, split=True).width for t in short), default=0))
        columns = max(2, int((WIDTH - 2 * EDGE + self.gap) // (self.node_w + self.gap)))
        folded = len(prefix) + math.ceil(len(loop) / 2)
        if loop and folded > columns:
            # A ring is worth narrower labels, when they let it stand in two rows.
            gap = (WIDTH - 2 * EDGE - folded * self.node_w) // (folded - 1)
            if gap >= NARROWEST:
                self.gap, columns = gap, folded
        self.cells, self.pairs = place(self.plan, flow, columns)

    def _node_width(self, name: str) -> float:
        text = self.texts[name]
        return max(text_width(name, NAME, "bold"), *(text_width(line, SIZE) for line in text.lines))

    def edges(self) -> list[Edge]:
        """In the order in which they may claim a straight way: the main path, payload, control."""
        main = set(self.pairs)
        made = []
        for order, (seam, text) in enumerate(zip(self.seams, self.edge_texts, strict=True)):
            ends = self.cells[seam.source], self.cells[seam.reader]
            label = self._label(seam, text, main)
            made.append(Edge(order, seam.source, seam.reader, *ends, label, stroke_width(text)))
        return sorted(made, key=lambda e: ((e.source, e.reader) not in main, not e.label.below, e.order))

    def _label(self, seam: Seam, text: EdgeText, main: set[tuple[str, str]]) -> LabelText:
        if text.line == "dotted" and (seam.source, seam.reader) not in main and not seam.delay:
            return small_text(text, LONGEST)
        return label_text(text, LONGEST, split=False)


def stroke_width(text: EdgeText) -> float:
    """Grows with the logarithm of the bytes: 100 B is a hair line, 1 GB is 5 px."""
    if text.line == "dotted":
        return 1.2
    return round(1.2 + 0.55 * max(0.0, math.log10(max(text.nbytes, 1)) - 2), 2)


def _clamp(width: float) -> float:
    return min(WIDEST, max(NARROWEST, math.ceil(width)))


class Frame(msgspec.Struct):
    """The y of every row and channel, what runs in each channel, and the x of every lane.

    through: of each lane its x, and the channels where it begins and ends
    stubs: channel → its vertical pieces, left to right, once they are asked for
    """

    items: dict[int, list[Item]]
    lanes: dict[int, float]
    tops: list[float]
    channel_tops: list[float]
    height: float
    through: list[tuple[float, int, int]]
    stubs: dict[int, list[Stub]] = {}

    def bottom(self, channel: int) -> float:
        return self.tops[channel] if channel < len(self.tops) else self.height


def layout(plan: Plan, audit: Audit) -> Picture:
    grid = Grid(plan, audit)
    edges = grid.edges()
    route.classify(edges, grid.cells, straight=not grid.layered)
    for edge in edges:
        _relabel(grid, edge)
    lanes = _gutters(grid, edges)
    frame = _frame(grid, route.items_of(edges, grid.rows, lanes), lanes)
    lines = []
    for edge in sorted(edges, key=lambda e: e.order):
        draw = _across if edge.kind == "across" else _down if edge.kind == "down" else _routed
        lines.append(draw(grid, frame, edge))
    return _shift(grid, frame, lines)


def _relabel(grid: Grid, edge: Edge) -> None:
    """A label in a gap or beside a vertical line is narrow and tall."""
    if edge.kind in ("across", "down") and edge.label.below:
        limit = LONGEST
        if edge.kind == "across":
            limit = abs(grid.centre[edge.source] - grid.centre[edge.reader]) - grid.node_w - 8
        edge.label = label_text(grid.edge_texts[edge.order], min(limit, LONGEST), split=True)
        edge.label = tall(edge.label) if edge.kind == "down" else edge.label
    elif edge.kind == "channel" and edge.label.below:
        room = (
            abs(grid.centre[edge.source] - grid.centre[edge.reader]) - 40
        )  # less what ports are off the middle
        if edge.label.width > room >= NARROWEST:
            edge.label = label_text(grid.edge_texts[edge.order], room, split=True)
    elif edge.kind == "across":
        edge.label = small_text(grid.edge_texts[edge.order], grid.gap - 8)


def _gutters(grid: Grid, edges: list[Edge]) -> dict[int, float]:
    """Lanes between columns where no labels stand, else left and right of all columns and of what hangs over them."""
    passing = [e for e in edges if e.kind == "gutter"]
    lanes = _corridors(grid, passing) if grid.layered else {}
    outside = [e for e in passing if e.order not in lanes]
    middle = (max(grid.centre.values(), default=0) + min(grid.centre.values(), default=0)) / 2
    for edge in outside:
        edge.gutter = -1 if grid.centre[edge.source] + grid.centre[edge.reader] <= 2 * middle else 1
    route.assign_ports(edges, grid.rows, grid.centre, grid.node_w, lanes)
    rest = [e for e in edges if e.kind != "gutter" or e.order in lanes]
    inner = [item for items in route.items_of(rest, grid.rows, lanes).values() for item in items]
    left = min([0.0, *(i.lo for i in inner)]) - LANE
    right = max([max(grid.centre.values(), default=0) + grid.node_w / 2, *(i.hi for i in inner)]) + LANE
    counts = {-1: 0, 1: 0}
    for edge in outside:
        at = LANE * counts[edge.gutter]
        lanes[edge.order] = left - at if edge.gutter < 0 else right + at
        counts[edge.gutter] += 1
    return lanes


def _corridors(grid: Grid, passing: list[Edge]) -> dict[int, float]:
    """The lane nearest to both ends, between two columns, that no other edge has on the same rows."""
    step = grid.node_w + grid.gap
    columns = max((c for _, c in grid.cells.values()), default=0)
    places = [
        (c * step + grid.node_w + grid.gap / 2 + shift)
        for c in range(columns)
        for shift in (0.0, -LANE, LANE)
    ]
    taken: dict[float, list[tuple[int, int]]] = {x: [] for x in places}
    lanes: dict[int, float] = {}
    for edge in passing:
        first, last = sorted((edge.a[0], edge.b[0]))
        ends = grid.centre[edge.source], grid.centre[edge.reader]
        free = [x for x in places if all(last <= a or b <= first for a, b in taken[x])]
        if free:
            lanes[edge.order] = min(free, key=lambda x: (abs(x - ends[0]) + abs(x - ends[1]), x))
            taken[lanes[edge.order]].append((first, last))
    return lanes


def _frame(grid: Grid, items: dict[int, list[Item]], lanes: dict[int, float]) -> Frame:
    """Stack channels and rows; each channel is as high as its tracks need. Sets every item's y."""
    passing = {i.edge.order: i.edge for here in items.values() for i in here if i.edge.kind == "gutter"}
    ends = {n: route.channels(edge, grid.rows) for n, edge in passing.items()}
    through = [(lanes[n], min(pair), max(pair)) for n, pair in ends.items()]
    frame = Frame(items, lanes, [], [], 0.0, through)
    y = 0.0
    for channel in range(grid.rows + 1):
        last = channel == grid.rows
        frame.channel_tops.append(y)
        heights = route.assign_tracks(items[channel], nearest_first=last)
        pad = 10.0 if heights else 0.0
        height = max(0.0 if channel == 0 or last else MIN_CHANNEL, sum(heights) + 2 * pad)
        route.set_heights(items[channel], heights, y + (height - sum(heights)) / 2)
        y += height
        if not last:
            frame.tops.append(y)
            y += grid.node_h
    frame.height = y
    return frame


def _across(grid: Grid, frame: Frame, edge: Edge) -> EdgeLine:
    y = frame.tops[edge.a[0]] + grid.node_h / 2
    half = grid.node_w / 2 if edge.b[1] > edge.a[1] else -grid.node_w / 2
    x1, x2 = grid.centre[edge.source] + half, grid.centre[edge.reader] - half
    labels = around(edge.label, (x1 + x2) / 2, y, edge.stroke)
    return EdgeLine(edge.ends, ((x1, y), (x2, y)), edge.stroke, labels, grid.edge_texts[edge.order])


def _ends(grid: Grid, frame: Frame, edge: Edge) -> tuple[float, float]:
    """The y at which an edge leaves its source and enters its reader."""
    at_a, at_b = route.channels(edge, grid.rows)
    leave = frame.tops[edge.a[0]] + (grid.node_h if at_a > edge.a[0] else 0)
    enter = frame.tops[edge.b[0]] + (grid.node_h if at_b > edge.b[0] else 0)
    return leave, enter


def _down(grid: Grid, frame: Frame, edge: Edge) -> EdgeLine:
    """A vertical line, its label in the middle unless something passes there."""
    channel, _ = route.channels(edge, grid.rows)
    leave, enter = _ends(grid, frame, edge)
    mine = next(i for i in frame.items[channel] if i.edge is edge)
    alone = all(i is mine or i.hi <= mine.lo or mine.hi <= i.lo for i in frame.items[channel])
    x = edge.ports[0]
    labels = beside(edge.label, x, (leave + enter) / 2 if alone else mine.y, edge.stroke)
    return EdgeLine(edge.ends, ((x, leave), (x, enter)), edge.stroke, labels, grid.edge_texts[edge.order])


def _routed(grid: Grid, frame: Frame, edge: Edge) -> EdgeLine:
    """Out of the source, along a track (over a gutter: along two), into the reader."""
    at_a, at_b = route.channels(edge, grid.rows)
    leave, enter = _ends(grid, frame, edge)
    first = next(i for i in frame.items[at_a] if i.edge is edge)
    last = next(i for i in frame.items[at_b] if i.edge is edge)
    x1, x2 = edge.ports
    points: list[Point] = [(x1, leave), (x1, first.y)]
    if edge.kind == "gutter":
        points += [(frame.lanes[edge.order], first.y), (frame.lanes[edge.order], last.y)]
    points += [(x2, last.y), (x2, enter)]
    channel, item = (at_a, first) if first.label else (at_b, last)
    if channel not in frame.stubs:
        frame.stubs[channel] = sorted(_stubs(frame, channel))
    stubs = frame.stubs[channel]
    return EdgeLine(
        edge.ends, tuple(points), edge.stroke, _best_label(edge, item, stubs), grid.edge_texts[edge.order]
    )


def _stubs(frame: Frame, channel: int) -> list[Stub]:
    """The vertical pieces in a channel."""
    top, bottom = frame.channel_tops[channel], frame.bottom(channel)
    out = []
    for item in frame.items[channel]:
        if item.edge.kind == "down":
            out.append((item.x1, top, bottom))
            continue
        for x, end in ((item.x1, item.ends[0]), (item.x2, item.ends[1])):
            # the channel's top is where a hop above it ends; a lane goes on to where its other end is
            up = end == "top" if end else _goes_up(item, channel)
            out.append((x, top, item.y) if up else (x, item.y, bottom))
    return out + [(x, top, bottom) for x, first, last in frame.through if first < channel < last]


def _goes_up(item: Item, channel: int) -> bool:
    """Whether an edge that passes a lane leaves this channel by it upward."""
    return channel > min(item.edge.a[0], item.edge.b[0]) + 1


def _best_label(edge: Edge, item: Item, stubs: list[Stub]) -> tuple[Label, ...]:
    """Where on its track, within what is reserved, the fewest vertical lines cross it; nearest the middle.

    stubs: from left to right
    """
    middle = (item.x1 + item.x2) / 2
    half = edge.label.width / 2 + CLEAR
    first, last = item.lo + half, item.hi - half
    count = min(PLACES, max(1, int((last - first) // 5)))
    places = [middle] if first <= middle <= last else []
    places += [first + (last - first) * i / count for i in range(count + 1)]
    best: tuple[tuple[int, float], tuple[Label, ...]] | None = None
    for x in places:
        labels = around(edge.label, x, item.y, edge.stroke)
        near = stubs[bisect_left(stubs, (x - half, 0.0, 0.0)) : bisect_left(stubs, (x + half, 0.0, 0.0))]
        hits = sum(1 for stub in near for box in labels if _hits(stub, box))
        if best is None or (hits, abs(x - middle)) < best[0]:
            best = ((hits, abs(x - middle)), labels)
    return best[1] if best else ()


def _hits(stub: Stub, box: Label) -> bool:
    x, y1, y2 = stub
    return box.x - CLEAR < x < box.x + box.w + CLEAR and y1 < box.y + box.h and box.y < y2


def _shift(grid: Grid, frame: Frame, lines: list[EdgeLine]) -> Picture:
    """Move everything so that the leftmost thing stands at the margin."""
    boxes = [label for line in lines for label in line.labels]
    xs = [x for line in lines for x, _ in line.points]
    centres = list(grid.centre.values()) or [0.0]
    left = min([min(centres) - grid.node_w / 2, *xs, *(b.x for b in boxes)])
    right = max([max(centres) + grid.node_w / 2, *xs, *(b.x + b.w for b in boxes)])
    dx = EDGE - left
    nodes = tuple(
        NodeBox(grid.centre[n] - grid.node_w / 2 + dx, frame.tops[r], grid.node_w, grid.node_h, grid.texts[n])
        for n, (r, _) in grid.cells.items()
    )
    edges = tuple(
        EdgeLine(
            line.ends, tuple((x + dx, y) for x, y in line.points), line.width,
            tuple(Label(b.x + dx, b.y, b.w, b.h, b.lines, b.anchor) for b in line.labels), line.text,
        )
        for line in lines
    )  # fmt: skip
    return Picture(right - left + 2 * EDGE, frame.height, nodes, edges)
