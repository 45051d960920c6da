"""How wide a text is without asking a font, and texts made safe for XML.

Widths are those of DejaVu Sans, the widest font that a viewer is likely to fall back to, so a box that fits
here fits everywhere.
"""

from __future__ import annotations

import functools
import html
import unicodedata
from typing import Literal

Font = Literal["sans", "bold", "mono"]


def _widths(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


# Hundredths of the font size for " " … "~".
_SANS = _widths(
    "32 40 46 84 64 95 78 27 39 39 50 84 32 36 32 34 64 64 64 64 64 64 64 64 "
    "64 64 34 34 84 84 84 53 100 68 69 70 77 63 58 77 75 29 29 66 56 86 75 79 "
    "60 79 69 63 61 73 68 99 69 61 69 39 34 39 84 50 50 61 63 55 63 62 35 63 "
    "63 28 28 58 28 97 63 61 63 63 41 52 39 63 59 82 59 59 52 64 34 64 84"
)
_BOLD = _widths(
    "35 46 52 84 70 100 87 31 46 46 52 84 38 42 38 37 70 70 70 70 70 70 70 70 "
    "70 70 40 40 84 84 84 58 100 77 76 73 83 68 68 82 84 37 37 77 64 100 84 85 "
    "73 85 77 72 68 81 77 110 77 72 73 46 37 46 84 50 50 67 72 59 72 68 44 72 "
    "71 34 34 67 34 104 71 69 72 72 49 60 48 71 65 92 65 65 58 71 37 71 84"
)
_OTHER = {"sans": 100, "bold": 110, "mono": 60}


@functools.lru_cache(maxsize=1 << 14)  # most texts of a large graph stand in it many times
def text_width(text: str, size: float, font: Font = "sans") -> float:
    """An estimate from above, in px."""
    total = 0.0
    for char in text:
        at = ord(char) - 32
        if unicodedata.east_asian_width(char) in "WF":
            total += 120
        elif font == "mono":
            total += 60.2
        elif 0 <= at < len(_SANS):
            total += (_BOLD if font == "bold" else _SANS)[at]
        else:
            total += _OTHER[font]
    return total * size / 100


def fit(text: str, size: float, font: Font, width: float) -> str:
    """The text, or its beginning and an ellipsis, no wider than `width`."""
    if text_width(text, size, font) <= width:
        return text
    while text and text_width(text + "…", size, font) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(text: str, size: float, width: float, lines: int) -> list[str]:
    """At most `lines` lines, broken at spaces, the last one cut with an ellipsis."""
    words = text.split()
    out: list[str] = []
    while words and len(out) < lines:
        n = 1
        while n < len(words) and text_width(" ".join(words[: n + 1]), size) <= width:
            n += 1
        last = len(out) == lines - 1
        out.append(fit(" ".join(words if last else words[:n]), size, "sans", width))
        words = words[n:]
    return out


def clean(text: str) -> str:
    """One line, with what XML 1.0 can't hold replaced."""
    legal = (
        text if text.isprintable() else "".join(c if c in "\t\n\r" or _legal(ord(c)) else "�" for c in text)
    )
    return " ".join(legal.split())


def _legal(code: int) -> bool:
    return 0x20 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or 0x10000 <= code <= 0x10FFFF


def escape(text: str) -> str:
    return html.escape("\n".join(clean(line) for line in text.split("\n")), quote=True)
