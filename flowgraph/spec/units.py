"""Bytes as people read them: decimal units, three significant digits."""

from __future__ import annotations

UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size_text(nbytes: float) -> str:
    """`512 B`, `8.70 KB`, `269 MB`. Whole bytes stay whole; a fraction of a byte shows as `<1 B`."""
    if 0 < nbytes < 1:
        return "<1 B"
    if nbytes < 999.5:
        return f"{nbytes:.0f} B" if nbytes >= 100 or nbytes == int(nbytes) else f"{nbytes:.3g} B"
    value = float(nbytes)
    for unit in UNITS[1:]:
        value /= 1000
        # 999.5 would round to 1000, which has four digits
        if value < 999.5 or unit == UNITS[-1]:
            break
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"


def per_step(nbytes: float) -> str:
    return f"{size_text(nbytes)}/step"


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
