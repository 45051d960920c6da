"""Differences and shares as people read them; bytes are `flowgraph.spec.units`."""

from __future__ import annotations

from flowgraph.spec.units import per_step, size_text

__all__ = ["per_step", "percent_text", "share_text", "size_text"]


def percent_text(percent: float, digits: int = 1) -> str:
    """A signed difference: `+4.2%`, `-12.0%`, `0.0%`."""
    text = f"{percent:+.{digits}f}%"
    return text[1:] if not text.strip("+-0.%") else text


def share_text(share: float) -> str:
    """A part of the whole: `100%`, `12.3%`, `<0.1%`, `0%`."""
    percent = share * 100
    if 0 < percent < 0.1:
        return "<0.1%"
    return f"{percent:.0f}%" if percent in (0, 100) else ">99.9%" if percent > 99.9 else f"{percent:.1f}%"
