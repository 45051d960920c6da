"""A diagram as text that a notebook shows as a picture."""

from __future__ import annotations

import html
from typing import Literal

from flowgraph.report.draw.png import to_png

Format = Literal["svg", "html", "mermaid", "dot", "table"]


class Diagram(str):
    """SVG, a page, Mermaid or DOT text, or a plain table. A notebook shows the first three."""

    kind: Format

    def __new__(cls, text: str, kind: Format) -> Diagram:
        made = super().__new__(cls, text)
        made.kind = kind
        return made

    def __getnewargs__(self) -> tuple[str, Format]:  # type: ignore[override]  # of a copy
        return str(self), self.kind

    def __repr__(self) -> str:
        return f"<Diagram: {self.kind}, {len(self):,} characters>"

    def png(self) -> bytes:
        """An SVG as a PNG of twice its size. Raises ValueError for another kind, FlowgraphError without resvg."""
        if self.kind != "svg":
            raise ValueError(f"a PNG is made of an svg diagram, and this one is {self.kind}")
        return to_png(self)

    def _repr_svg_(self) -> str | None:
        return str(self) if self.kind == "svg" else None

    def _repr_html_(self) -> str | None:
        """In a frame of its own, so that a page's style stays in it."""
        if self.kind != "html":
            return None
        return f'<iframe width="100%" height="900" style="border:0" srcdoc="{html.escape(self)}"></iframe>'

    def _repr_markdown_(self) -> str | None:
        return f"```mermaid\n{self}```\n" if self.kind == "mermaid" else None
