"""How edges run: straight where two hops stand side by side, else along tracks in the channels between rows.

Channel r lies above row r, the last one below the last row. What an item reserves of its track includes its
label, so no two labels can meet. An edge over more than one row passes through a gutter at the side.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

from flowgraph.report.draw.cells import Cell
from flowgraph.report.draw.shapes import CLEAR, LINE, LabelText

Kind = Literal["across", "down", "channel", "gutter"]
Side = Literal["top", "bottom"]
FAR = 1e6


class Edge(msgspec.Struct):
    """One edge on its way to a picture. order: the seam's place in the plan."""

    order: int
    source: str
    reader: str
    a: Cell
    b: Cell
    label: LabelText
    stroke: float
    kind: Kind = "channel"
    ports: tuple[float, float] = (0.0, 0.0)
    gutter: int = 0

    @property
    def ends(self) -> tuple[str, str]:
        return self.source, self.reader


class Item(msgspec.Struct):
    """A horizontal piece of an edge in a channel, from x1 to x2; lo and hi: all that it reserves.

    ends: which side of the channel each x leaves by ("" for a gutter). label: the edge's label stands here
    """

    edge: Edge
    x1: float
    x2: float
    ends: tuple[str, str]
    label: bool
    lo: float = 0.0
    hi: float = 0.0
    track: int = 0
    y: float = 0.0

    @property
    def above(self) -> float:
        return len(self.edge.label.above) * LINE + CLEAR if self.label else CLEAR

    @property
    def below(self) -> float:
        return len(self.edge.label.below) * LINE + CLEAR if self.label else CLEAR


def classify(edges: list[Edge], cells: dict[str, Cell], *, straight: bool) -> None:
    """Straight lines go to the first in the list that asks for the way; everything else is routed.

    straight: whether hops that stand side by side may be joined so, which takes room for a label between them
    """
    taken = set(cells.values())
    used: set[tuple[Cell, Cell]] = set()
    for edge in edges:
        (r1, c1), (r2, c2) = edge.a, edge.b
        steps = sorted([edge.a, edge.b])
        if r1 == r2 and edge.a != edge.b and straight:
            cells_between = [(r1, c) for c in range(steps[0][1], steps[1][1] + 1)]
            ways = list(pairwise(cells_between))
            if not taken & set(cells_between[1:-1]) and not used & set(ways):
                edge.kind = "across"
                used |= set(ways)
        elif c1 == c2 and abs(r1 - r2) == 1 and (steps[0], steps[1]) not in used:
            edge.kind = "down"
            used.add((steps[0], steps[1]))
        elif abs(r1 - r2) > 1:
            edge.kind = "gutter"


def channels(edge: Edge, rows: int) -> tuple[int, int]:
    """The channels at an edge's source and reader; the same one unless it passes a gutter."""
    (r1, _), (r2, _) = edge.a, edge.b
    if r1 == r2:
        # payload below and control above where there is one row; else outward from the picture's middle
        outer = bool(edge.label.below) if rows == 1 else r1 == rows - 1
        return (r1 + 1, r1 + 1) if outer else (r1, r1)
    return (r1 + 1, r2) if r2 > r1 else (r1, r2 + 1)


def assign_ports(
    edges: list[Edge], rows: int, centre: dict[str, float], width: float, lanes: Mapping[int, float]
) -> None:
    """Where on its node's top or bottom each edge begins and ends, in an order that keeps crossings few.

    lanes: edge order → x of a lane between columns that it passes through
    """
    sides: dict[tuple[str, Side], list[tuple[tuple[float, ...], Edge, int]]] = {}
    middle: set[tuple[str, Side]] = set()
    for edge in (e for e in edges if e.kind != "across"):
        at_a, at_b = channels(edge, rows)
        for end, name, other, channel, row in (
            (0, edge.source, edge.reader, at_a, edge.a[0]),
            (1, edge.reader, edge.source, at_b, edge.b[0]),
        ):
            side: Side = "top" if channel == row else "bottom"
            if edge.kind == "down":
                middle.add((name, side))
                edge.ports = (centre[edge.source], centre[edge.reader])
                continue
            there = centre[other] if edge.kind != "gutter" else lanes.get(edge.order, edge.gutter * FAR)
            key = _port_key(there, centre[name], arc=edge.a[0] == edge.b[0])
            sides.setdefault((name, side), []).append(((*key, edge.order), edge, end))
    for (name, side), entries in sides.items():
        entries.sort(key=lambda e: e[0])
        lefts = sum(1 for key, _, _ in entries if key[0] < 0)
        for i, (_, edge, end) in enumerate(entries):
            shift = _shift(i, lefts, len(entries), width, (name, side) in middle) + (
                4 if side == "top" else -4
            )
            ports = list(edge.ports)
            ports[end] = centre[name] + shift
            edge.ports = (ports[0], ports[1])


def _port_key(there: float, here: float, arc: bool) -> tuple[float, float, float]:
    """Sorts ports from left to right. An arc to a farther hop goes round the nearer ones, so outside."""
    right = there > here  # what ends in the same column leaves the right side to labels
    if arc:
        return (1, 0, -there) if right else (-1, 1, -there)
    return (1, 1, there) if right else (-1, 0, there)


def _shift(i: int, lefts: int, count: int, width: float, middle: bool) -> float:
    """The i-th port's place, relative to the node's centre, which `middle` keeps free."""
    if not middle:
        gap = min(18.0, (width - 28) / max(1, count - 1))
        return (i - (count - 1) / 2) * gap
    rights = count - lefts
    room = width / 2 - 30
    if i < lefts:
        return -14 - (lefts - 1 - i) * min(14.0, room / max(1, lefts - 1))
    return 14 + (i - lefts) * min(14.0, room / max(1, rights - 1))


def items_of(edges: list[Edge], rows: int, lanes: Mapping[int, float]) -> dict[int, list[Item]]:
    """Channel → what runs in it. lanes: edge order → x of its gutter lane."""
    out: dict[int, list[Item]] = {channel: [] for channel in range(rows + 1)}
    for edge in (e for e in edges if e.kind != "across"):
        at_a, at_b = channels(edge, rows)
        leaves: Side = "top" if at_a == edge.a[0] + 1 else "bottom"
        enters: Side = "top" if at_b == edge.b[0] + 1 else "bottom"
        x1, x2 = edge.ports
        if edge.kind == "gutter":
            lane = lanes[edge.order]
            first = abs(x1 - lane) >= abs(x2 - lane)
            out[at_a].append(_reserve(Item(edge, x1, lane, (leaves, ""), first)))
            out[at_b].append(_reserve(Item(edge, lane, x2, ("", enters), not first)))
        else:
            out[at_a].append(_reserve(Item(edge, x1, x2, (leaves, enters), True)))
    return out


def _reserve(item: Item) -> Item:
    """An item that is shorter than its label keeps room for it at the inner side."""
    item.lo, item.hi = min(item.x1, item.x2), max(item.x1, item.x2)
    if item.label:
        width = item.edge.label.width + 3 * CLEAR + item.edge.stroke
        if item.edge.kind == "down":
            item.hi = item.lo + width
        elif item.hi - item.lo < width + 2 * CLEAR:
            left = item.edge.a[1] == item.edge.b[1] if item.edge.kind == "channel" else item.edge.gutter > 0
            if left:
                item.lo -= width
            else:
                item.hi += width
    item.lo, item.hi = item.lo - CLEAR, item.hi + CLEAR
    return item


def assign_tracks(items: list[Item], *, nearest_first: bool) -> list[float]:
    """Give every item a track below all tracks that it overlaps so far. Returns the height of each track.

    Longer items come first, unless the channel lies below its row: an arc goes round the shorter ones.
    Labels beside straight lines come first or last, whichever lets fewer lines pass behind them.
    """
    _assign(items, nearest_first, straight_first=False)
    if _passing(items):
        before = [item.track for item in items], _passing(items)
        _assign(items, nearest_first, straight_first=True)
        if _passing(items) >= before[1]:
            for item, track in zip(items, before[0], strict=True):
                item.track = track
    tracks = max((item.track for item in items), default=-1) + 1
    return [_track_height([item for item in items if item.track == track]) for track in range(tracks)]


def _assign(items: list[Item], nearest_first: bool, straight_first: bool) -> None:
    sign = 1 if nearest_first else -1

    def key(item: Item) -> tuple[bool, float, int, bool]:
        late = (item.edge.kind == "down") != straight_first
        return late, sign * abs(item.x2 - item.x1), item.edge.order, item.label

    placed: list[Item] = []
    for item in sorted(items, key=key):
        over = [p.track for p in placed if p.lo < item.hi and item.lo < p.hi]
        item.track = max(over, default=-1) + 1
        placed.append(item)


def _passing(items: list[Item]) -> int:
    """How many vertical pieces run behind the label of a straight line."""
    count = 0
    for label in (i for i in items if i.edge.kind == "down"):
        for item in (i for i in items if i.edge.kind != "down"):
            for x, end in ((item.x1, item.ends[0]), (item.x2, item.ends[1])):
                reaches = item.track > label.track if end == "top" else item.track < label.track
                count += bool(end) and reaches and label.lo + 2 * CLEAR < x < label.hi
    return count


def _track_height(here: list[Item]) -> float:
    flat = [i for i in here if i.edge.kind != "down"]
    height = max((i.above for i in flat), default=0) + max((i.below for i in flat), default=0)
    return max(height, *(i.edge.label.height for i in here if i.edge.kind == "down"), 0) + 6


def set_heights(items: list[Item], heights: list[float], top: float) -> None:
    """The y of every item's line, so that all labels on a track fit above and below it."""
    above: dict[int, float] = {}
    starts = list(accumulate(heights, initial=top))
    for item in items:
        if item.edge.kind != "down":
            above[item.track] = max(above.get(item.track, 0.0), item.above)
    for item in items:
        beside = item.edge.kind == "down"
        item.y = starts[item.track] + (heights[item.track] / 2 if beside else above[item.track] + 3)
