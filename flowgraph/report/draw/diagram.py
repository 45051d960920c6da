"""A diagram as text that a notebook shows as a picture."""

from __future__ import annotations

from typing import Literal

Format = Literal["svg", "mermaid"]


class Diagram(str):
    """SVG or Mermaid text. As the value of a notebook's cell it is drawn."""

    kind: Format

    def __new__(cls, text: str, kind: Format) -> Diagram:
        made = super().__new__(cls, text)
        made.kind = kind
        return made

    def __getnewargs__(self) -> tuple[str, Format]:  # type: ignore[override]  # of a copy
        return str(self), self.kind

    def __repr__(self) -> str:
        return f"<Diagram: {self.kind}, {len(self):,} characters>"

    def _repr_svg_(self) -> str | None:
        return str(self) if self.kind == "svg" else None

    def _repr_markdown_(self) -> str | None:
        return f"```mermaid\n{self}```\n" if self.kind == "mermaid" else None
