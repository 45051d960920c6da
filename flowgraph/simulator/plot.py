"""A simulation as SVG: small multiples over virtual time, one point a step, light or dark as the viewer prefers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowgraph.report.draw.colours import DARK, LIGHT
from flowgraph.report.draw.svg import SANS
from flowgraph.report.draw.text import clean, escape, fit, text_width
from flowgraph.simulator.outcome import Simulated, time_text
from flowgraph.simulator.trace import Point

WIDTH, HEIGHT = 760.0, 96.0  # of a panel
LEFT, RIGHT, TOP, GAP = 64.0, 16.0, 66.0, 40.0
INK = ("#0969da", "#bc4c00"), ("#58a6ff", "#f0883e")  # first and second line, on light and on dark
MOST = 400  # points of a line; more are averaged together

STYLE = f"""
text {{ font-family: {SANS}; font-size: 10px; fill: #1f2328; }}
.bg {{ fill: #ffffff; }}
.title {{ font-size: 18px; font-weight: 700; }}
.name {{ font-size: 12px; font-weight: 700; }}
.soft {{ fill: #59636e; }}
.frame {{ fill: none; stroke: #d1d9e0; stroke-width: 1; }}
.warm {{ fill: {LIGHT[7]}; }}
.l0, .l1 {{ fill: none; stroke-width: 1.6; stroke-linejoin: round; }}
.l0 {{ stroke: {INK[0][0]}; }}
.l1 {{ stroke: {INK[0][1]}; stroke-dasharray: 5 2; }}
.t0 {{ fill: {INK[0][0]}; }}
.t1 {{ fill: {INK[0][1]}; }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3; }}
.bg {{ fill: #0d1117; }}
.soft {{ fill: #9198a1; }}
.frame {{ stroke: #3d444d; }}
.warm {{ fill: {DARK[7]}; }}
.l0 {{ stroke: {INK[1][0]}; }}
.l1 {{ stroke: {INK[1][1]}; }}
.t0 {{ fill: {INK[1][0]}; }}
.t1 {{ fill: {INK[1][1]}; }}
}}
"""


class Panel(NamedTuple):
    """One panel: its name, its lines by name, and whether they are shares of 1."""

    name: str
    lines: tuple[tuple[str, Callable[[Point], float]], ...]
    share: bool = False


PANELS = (
    Panel("trajectories", (("in flight", lambda p: p.in_flight), ("watermark", lambda p: p.watermark))),
    Panel("waiting", (("ready trajectories", lambda p: p.ready), ("requests without a slot", lambda p: p.waiting))),
    Panel("lag of a batch, versions", (("mean", lambda p: p.lag_mean), ("most", lambda p: p.lag_max))),
    Panel("idle", (("slots empty", lambda p: p.slots_empty), ("trainer", lambda p: p.trainer_idle)), True),
    Panel("seconds a step", (("", lambda p: p.seconds),)),
)  # fmt: skip


def to_svg(found: Simulated) -> str:
    """The same bytes for the same result. The steps that were not measured stand on a shade."""
    points = _thinned(found.points)
    width, height = LEFT + WIDTH + RIGHT, TOP + len(PANELS) * (HEIGHT + GAP) + 6
    end = found.points[-1].at or 1.0
    warm = found.points[found.warmup - 1].at / end if found.warmup else 0.0
    said = (
        f"{found.engines:,} engines of {found.slots:,} slots, responses {found.lengths}, seed {found.seed}: "
        f"{found.per_minute:,.1f} trajectories/min, lag {found.lag.mean:.2f}, {found.slots_empty:.0%} of slots empty, "
        f"trainer idle {found.trainer_idle:.0%}"
    )
    title = fit(clean(f"{found.graph}, simulated"), 18, "bold", width - 32)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(clean(said))}">',
        f"<style>{STYLE}</style>",
        f'<rect class="bg" width="{_n(width)}" height="{_n(height)}"/>',
        _text(16, 28, title, "title"),
        _text(16, 46, fit(clean(said), 10, "sans", width - 32), "soft"),
    ]
    for i, panel in enumerate(PANELS):
        out += _panel(panel, points, end, warm, TOP + i * (HEIGHT + GAP) + 16)
    return "\n".join([*out, "</svg>"]) + "\n"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST points, each the last of as many steps: what a screen can show."""
    every = max(1, len(points) // MOST)
    return list(points[every - 1 :: every])


def _panel(panel: Panel, points: Sequence[Point], end: float, warm: float, y: float) -> list[str]:
    values = [[of(p) for p in points] for _, of in panel.lines]
    top = 1.0 if panel.share else _round_up(max((v for line in values for v in line), default=1.0))
    out = [
        f'<g data-panel="{escape(panel.name)}">',
        _text(LEFT, y - 6, panel.name, "name"),
        f'<rect class="warm" x="{_n(LEFT)}" y="{_n(y)}" width="{_n(warm * WIDTH)}" height="{_n(HEIGHT)}"/>',
        f'<rect class="frame" x="{_n(LEFT)}" y="{_n(y)}" width="{_n(WIDTH)}" height="{_n(HEIGHT)}"/>',
        _text(LEFT - 6, y + 8, f"{top:.0%}" if panel.share else f"{top:,g}", "soft", "end"),
        _text(LEFT - 6, y + HEIGHT, "0", "soft", "end"),
        _text(LEFT + WIDTH, y + HEIGHT + 13, time_text(end), "soft", "end"),
    ]
    x = LEFT + text_width(panel.name, 12, "bold") + 16
    for i, (name, _) in enumerate(panel.lines):
        out.append(_text(x, y - 6, name, f"t{i}"))
        x += text_width(name, 10) + 14
    for i, line in reversed(list(enumerate(values))):
        where = (
            (LEFT + p.at / end * WIDTH, y + HEIGHT * (1 - v / top)) for p, v in zip(points, line, strict=True)
        )
        path = " ".join(f"{_n(a)},{_n(b)}" for a, b in where)
        out.append(f'<polyline class="l{i}" points="{path}"/>')
    return [*out, "</g>"]


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten, from above."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(n * power for n in (1, 2, 5, 10) if n * power >= value)


def _text(x: float, y: float, text: str, css: str, anchor: str = "") -> str:
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{css}" x="{_n(x)}" y="{_n(y)}"{where}>{escape(text)}</text>'


def _n(value: float) -> str:
    """A coordinate in tenths of a px, without a trailing zero."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text
