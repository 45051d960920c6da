"""The SVG as a PNG, drawn by resvg: an optional library, so that flowgraph is light without it."""

from __future__ import annotations

from flowgraph.errors import FlowgraphError

SCALE = 2  # pixels for one of the SVG's, sharp on a dense screen
PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16">{}</svg>'
GLYPH = '<text x="1" y="14" font-family="sans-serif" font-size="14">H</text>'


def to_png(svg: str) -> bytes:
    """In the light colours, on white, at twice its size.

    Raises FlowgraphError, naming what to install, without the library or without any font to write with.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise FlowgraphError("a PNG needs resvg: pip install 'flowgraph-rl[png]', or draw an .svg") from None
    if bytes(svg_to_bytes(svg_string=PROBE.format(GLYPH))) == bytes(
        svg_to_bytes(svg_string=PROBE.format(""))
    ):
        text = (
            "a PNG needs a font, and there is none: install one (Debian: fonts-dejavu-core), or draw an .svg"
        )
        raise FlowgraphError(text)
    return bytes(svg_to_bytes(svg_string=svg, zoom=SCALE, background="#ffffff"))
