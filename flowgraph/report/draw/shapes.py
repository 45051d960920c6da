"""The parts of a picture: boxes with their text, lines with their labels. Everything in px, y downward."""

from __future__ import annotations

import msgspec

from flowgraph.report.draw.labels import EdgeText, NodeText
from flowgraph.report.draw.text import Font, fit, text_width

LINE = 13.0  # height of a line of text in a label
SIZE = 10.0  # its font size
CLEAR = 4.0  # between a line and the text beside it
Point = tuple[float, float]


class Span(msgspec.Struct, frozen=True):
    """A run of text in one font. css: the class that colours it."""

    text: str
    font: Font
    css: str

    @property
    def width(self) -> float:
        return text_width(self.text, SIZE, self.font)


TextLine = tuple[Span, ...]


class Label(msgspec.Struct, frozen=True):
    """Lines of text in a box. anchor: where x of the box lies in each line."""

    x: float
    y: float
    w: float
    h: float
    lines: tuple[TextLine, ...]
    anchor: str = "middle"


class NodeBox(msgspec.Struct, frozen=True):
    x: float
    y: float
    w: float
    h: float
    text: NodeText


class EdgeLine(msgspec.Struct, frozen=True):
    """A path of right angles from node to node, and its labels. ends: source and reader."""

    ends: tuple[str, str]
    points: tuple[Point, ...]
    width: float
    labels: tuple[Label, ...]
    text: EdgeText


class Picture(msgspec.Struct, frozen=True):
    """All that is drawn between the title and the legend, inside [0, width] × [0, height]."""

    width: float
    height: float
    nodes: tuple[NodeBox, ...]
    edges: tuple[EdgeLine, ...]


def line_width(lines: tuple[TextLine, ...]) -> float:
    return max((sum(s.width for s in line) + SPACE * (len(line) - 1) for line in lines), default=0.0)


SPACE = 4.0  # between the runs of a line


class LabelText(msgspec.Struct, frozen=True):
    """An edge's text, split into what stands above its line and what below."""

    above: tuple[TextLine, ...]
    below: tuple[TextLine, ...]

    @property
    def width(self) -> float:
        return line_width(self.above + self.below)

    @property
    def height(self) -> float:
        return (len(self.above) + len(self.below)) * LINE


def label_text(text: EdgeText, limit: float, *, split: bool) -> LabelText:
    """Every line fitted to `limit`. split: what stands below takes two short lines instead of one."""
    shape = [Span(fit(text.shape, SIZE, "mono", limit), "mono", "shape")]
    if text.more:
        room = limit - text_width(text.more, SIZE) - SPACE
        shape = [Span(fit(text.shape, SIZE, "mono", room), "mono", "shape"), Span(text.more, "sans", "soft")]
    price = Span(fit(text.price, SIZE, "bold", limit), "bold", "price")
    before = (Span(f"{text.before} →", "sans", "soft"),) if text.before else ()
    together = not split and line_width(((*before, price),)) <= limit
    priced: list[TextLine] = [(*before, price)] if together else [line for line in (before, (price,)) if line]
    above: list[TextLine] = [tuple(shape), *priced]
    if text.measured:
        above.append(
            (Span(text.measured, "bold", "off" if text.off else "price"), Span("measured", "sans", "soft"))
        )
    end = f"over {text.over}" if text.over else text.by
    words = (
        [text.how + ",", text.until, end]
        if split
        else ["; ".join(w for w in (f"{text.how}, {text.until}", end) if w)]
    )
    below: list[TextLine] = [
        (Span(fit(word, SIZE, "sans", limit), "sans", "soft"),) for word in words if word
    ]
    return LabelText(tuple(above), tuple(below))


def small_text(text: EdgeText, limit: float) -> LabelText:
    """A control seam beside the main path: only what it is called."""
    return LabelText(((Span(fit(text.shape, SIZE, "sans", limit), "sans", "soft"),),), ())


def around(label: LabelText, x: float, y: float, stroke: float) -> tuple[Label, ...]:
    """Boxes centred at x, above and below a horizontal line at y."""
    gap = CLEAR + stroke / 2
    width = label.width
    out = []
    if label.above:
        height = len(label.above) * LINE
        out.append(Label(x - width / 2, y - gap - height, width, height, label.above))
    if label.below:
        out.append(Label(x - width / 2, y + gap, width, len(label.below) * LINE, label.below))
    return tuple(out)


def beside(label: LabelText, x: float, middle: float, stroke: float) -> tuple[Label, ...]:
    """One box to the right of a vertical line at x."""
    lines = label.above + label.below
    top = middle - label.height / 2
    return (Label(x + CLEAR + 2 + stroke / 2, top, label.width, label.height, lines, "start"),)


def tall(label: LabelText) -> LabelText:
    """The same text as a narrow column: each run of a line on its own line."""
    return LabelText(tuple((span,) for line in label.above for span in line), label.below)
