"""SVG of our own: the same bytes every time, light or dark by the viewer's preference."""

from __future__ import annotations

import math

from flowgraph.plan.plan import Plan
from flowgraph.report.audit.rows import Audit
from flowgraph.report.draw.colours import DARK, LIGHT, owner_classes
from flowgraph.report.draw.labels import OFF, dims_text, held_by, totals_text
from flowgraph.report.draw.layout import HEAD, NAME, layout
from flowgraph.report.draw.shapes import LINE, SIZE, SPACE, EdgeLine, Label, NodeBox, Picture, Point, Span
from flowgraph.report.draw.text import clean, escape, fit, text_width, wrap

SANS = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
NARROWEST = 560.0  # so that a chain of two hops still has room for title and legend


def _fills(colours: tuple[str, ...]) -> str:
    return "\n".join(f".o{i} {{ fill: {colour}; }}" for i, colour in enumerate(colours))


STYLE = """
text { font-family: SANS; font-size: 10px; fill: #1f2328; }
.bg { fill: #ffffff; }
.title { font-size: 18px; font-weight: 700; }
.doc { font-size: 12px; fill: #59636e; }
.name { font-size: 13px; font-weight: 700; }
.shape { font-family: MONO; }
.price { font-weight: 700; }
.off { font-weight: 700; fill: #9a6700; }
.soft { fill: #59636e; }
.box { fill: #ffffff; stroke: #818b98; stroke-width: 1; }
.head { stroke: #818b98; stroke-width: 1; }
LIGHT
.line { fill: none; stroke: #59636e; }
.tip { fill: #59636e; }
.dashed { stroke-dasharray: 7 4; }
.dotted { stroke-dasharray: 1.5 3.5; stroke-linecap: round; }
.line.hot { stroke: #cf222e; }
.tip.hot { fill: #cf222e; }
.price.hot { fill: #cf222e; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.bg { fill: #0d1117; }
.doc, .soft { fill: #9198a1; }
.off { fill: #d29922; }
.box { fill: #151b23; stroke: #656c76; }
.head { stroke: #656c76; }
DARK
.line { stroke: #9198a1; }
.tip { fill: #9198a1; }
.line.hot { stroke: #f85149; }
.tip.hot { fill: #f85149; }
.price.hot { fill: #ff7b72; }
}
"""
for _key, _value in {"SANS": SANS, "MONO": MONO, "LIGHT": _fills(LIGHT), "DARK": _fills(DARK)}.items():
    STYLE = STYLE.replace(_key, _value)


def to_svg(plan: Plan, audit: Audit, *, style: bool = True) -> str:
    """The picture. style=False leaves STYLE out, for a page that holds several pictures and the style once.

    Every hop is a group with its name in `data-hop`, every seam one with `source→reader` in `data-seam`.
    """
    picture = layout(plan, audit)
    width = math.ceil(max(picture.width, NARROWEST))
    head, top = _title(plan, width)
    legend, legend_height = _legend(plan, audit, picture, width, top + picture.height + 14)
    dx = (width - picture.width) / 2
    height = math.ceil(top + picture.height + 14 + legend_height + 8)
    colours = owner_classes(plan)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(_caption(plan))}">',
        *([f"<style>{STYLE}</style>"] if style else []),
        f'<rect class="bg" width="{width}" height="{height}"/>',
        *head,
        f'<g transform="translate({_n(dx)} {_n(top)})">',
        *(_edge(edge) for edge in picture.edges),
        *(_labels(edge) for edge in picture.edges),
        *(_node(node, colours[node.text.owner]) for node in picture.nodes),
        "</g>",
        *legend,
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def _caption(plan: Plan) -> str:
    return clean(f"data flow of {plan.graph}: {len(plan.hops)} hops, {len(plan.seams)} seams")


def _title(plan: Plan, width: float) -> tuple[list[str], float]:
    out = [_text(16, 28, fit(clean(plan.graph), 18, "bold", width - 32), "title")]
    y = 28.0
    for line in wrap(clean(plan.doc), 12, width - 32, 2):
        y += 18
        out.append(_text(16, y, line, "doc"))
    return out, y + 22


# --- nodes and edges ---------------------------------------------------------------------------------------


def _node(node: NodeBox, colour: str) -> str:
    text = node.text
    middle = node.x + node.w / 2
    x, y, w, h = _n(node.x), _n(node.y), _n(node.w), _n(node.h)
    low, right = _n(node.y + HEAD), _n(node.x + node.w - 5)
    head = f"M{x} {low}V{_n(node.y + 5)}q0 -5 5 -5H{right}q5 0 5 5V{low}z"
    name = fit(clean(text.name), NAME, "bold", node.w - 8)
    out = [
        f'<g data-hop="{escape(text.name)}">',
        f"<title>{escape(text.tooltip)}</title>",
        f'<rect class="box" x="{x}" y="{y}" width="{w}" height="{h}" rx="5"/>',
        f'<path class="head {colour}" d="{head}"/>',
        _text(middle, node.y + 17, name, "name", "middle"),
    ]
    free = node.h - HEAD - len(text.lines) * LINE
    for i, line in enumerate(text.lines):
        y_line = node.y + HEAD + free / 2 + i * LINE + LINE - 3
        shown = fit(clean(line), SIZE, "sans", node.w - 8)
        out.append(_text(middle, y_line, shown, "soft" if i else "", "middle"))
    return "".join([*out, "</g>"])


def _edge(edge: EdgeLine) -> str:
    hot = " hot" if edge.text.hot else ""
    style = "" if edge.text.line == "solid" else f" {edge.text.line}"
    (x1, y1), (x2, y2) = edge.points[-2:]
    size = 6 + edge.width * 1.4
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    base = x2 - ux * size, y2 - uy * size
    wing = size * 0.42
    tip = " ".join(
        f"{_n(x)},{_n(y)}"
        for x, y in (
            (x2, y2),
            (base[0] - uy * wing, base[1] + ux * wing),
            (base[0] + uy * wing, base[1] - ux * wing),
        )
    )
    path = _path((*edge.points[:-1], (x2 - ux * size * 0.8, y2 - uy * size * 0.8)))
    return (
        f'<g data-seam="{_seam(edge)}"><title>{escape(edge.text.tooltip)}</title>'
        f'<path class="line{style}{hot}" stroke-width="{_n(edge.width)}" d="{path}"/>'
        f'<polygon class="tip{hot}" points="{tip}"/></g>'
    )


def _path(points: tuple[Point, ...]) -> str:
    """Straight pieces with rounded corners."""
    out = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for before, at, after in zip(points, points[1:], points[2:], strict=False):
        a, b = math.dist(before, at), math.dist(at, after)
        r = min(6.0, a / 2, b / 2)
        if r > 0:
            start = at[0] + (before[0] - at[0]) * r / a, at[1] + (before[1] - at[1]) * r / a
            end = at[0] + (after[0] - at[0]) * r / b, at[1] + (after[1] - at[1]) * r / b
            out.append(f"L{_n(start[0])} {_n(start[1])}Q{_n(at[0])} {_n(at[1])} {_n(end[0])} {_n(end[1])}")
    out.append(f"L{_n(points[-1][0])} {_n(points[-1][1])}")
    return "".join(out)


def _seam(edge: EdgeLine) -> str:
    return escape(f"{edge.ends[0]}→{edge.ends[1]}")


def _labels(edge: EdgeLine) -> str:
    return "".join(_label(label, edge) for label in edge.labels)


def _label(label: Label, edge: EdgeLine) -> str:
    """The text on a patch of background, so that a line that passes behind doesn't strike it through."""
    hot = " hot" if edge.text.hot else ""
    out = [
        f'<g data-seam="{_seam(edge)}"><title>{escape(edge.text.tooltip)}</title>',
        f'<rect class="bg" x="{_n(label.x - 1)}" y="{_n(label.y)}" '
        f'width="{_n(label.w + 2)}" height="{_n(label.h)}"/>',
    ]
    x = label.x if label.anchor == "start" else label.x + label.w / 2
    for i, line in enumerate(label.lines):
        spans = "".join(_span(span, hot, j) for j, span in enumerate(line))
        anchor = "" if label.anchor == "start" else ' text-anchor="middle"'
        out.append(f'<text x="{_n(x)}" y="{_n(label.y + (i + 1) * LINE - 3)}"{anchor}>{spans}</text>')
    return "".join([*out, "</g>"])


def _span(span: Span, hot: str, index: int) -> str:
    css = span.css + (hot if span.css == "price" else "")
    gap = f' dx="{_n(SPACE)}"' if index else ""
    return f'<tspan class="{css}"{gap}>{escape(span.text)}</tspan>'


# --- the legend --------------------------------------------------------------------------------------------


def _legend(plan: Plan, audit: Audit, picture: Picture, width: float, top: float) -> tuple[list[str], float]:
    """The line styles and colours that the picture uses, then totals and dims."""
    out: list[str] = []
    x, y = 16.0, top + 8
    for sample, name in _keys(plan, picture):
        entry = 34 + text_width(name, SIZE) + 18
        if x + entry > width and x > 16:
            x, y = 16.0, y + 17
        out += [
            f'<g transform="translate({_n(x)} {_n(y)})">{sample}</g>',
            _text(x + 34, y + 3.5, name, "soft"),
        ]
        x += entry
    texts = wrap(
        f"means, as written → compiled; line width grows with log bytes; {totals_text(audit)}",
        SIZE,
        width - 32,
        2,
    )
    for line in texts:
        y += 17
        out.append(_text(16, y + 3.5, line, "soft"))
    if any(edge.text.off for edge in picture.edges):
        y += 17
        out.append(_text(16, y + 3.5, f"measured differs from predicted by more than {OFF:g}%", "off"))
    for line in wrap(clean(dims_text(plan.dims)), SIZE, width - 48, 4):
        y += 17
        out.append(_text(16, y + 3.5, line, "shape"))
    return out, y + 8 - top


def _keys(plan: Plan, picture: Picture) -> list[tuple[str, str]]:
    def line(css: str, stroke: float = 1.8) -> str:
        return f'<path class="line {css}" stroke-width="{stroke}" d="M0 0H26"/>'

    def chip(css: str) -> str:
        return f'<rect class="head {css}" x="4" y="-6" width="18" height="11" rx="2"/>'

    lines = {edge.text.line for edge in picture.edges}
    over = any(edge.text.over for edge in picture.edges)
    keys = [
        ("solid" in lines, line(""), "written by its source"),
        ("dashed" in lines, line("dashed"), "by reference, from an earlier writer"),
        ("dotted" in lines, line("dotted", 1.2), "control, no payload"),
        (any(edge.text.hot for edge in picture.edges), line("hot", 3), _hot(over)),
        *((True, chip(css), f"{name} · {held_by(plan, name)}") for name, css in owner_classes(plan).items()),
    ]
    return [(sample, name) for used, sample, name in keys if used]


def _hot(over: bool) -> str:
    return "over half of all bytes, or over a budget" if over else "over half of all bytes"


def _text(x: float, y: float, text: str, css: str, anchor: str = "") -> str:
    where = f' text-anchor="{anchor}"' if anchor else ""
    klass = f' class="{css}"' if css else ""
    return f'<text{klass} x="{_n(x)}" y="{_n(y)}"{where}>{escape(text)}</text>'


def _n(value: float) -> str:
    """A coordinate in tenths of a px, without a trailing zero."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text
