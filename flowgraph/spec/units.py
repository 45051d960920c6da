"""Bytes as people read and write them: `8.70 KB`, `64 KB/step`, `2 GiB`. Units are decimal; KiB and so on are not."""

from __future__ import annotations

import math
import re
from decimal import Decimal

import msgspec

UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
BYTES = {unit: 1000**i for i, unit in enumerate(UNITS)} | {
    f"{unit[0]}iB": 1024**i for i, unit in enumerate(UNITS) if i
}
AMOUNT = rf"([0-9]{{1,15}}(?:\.[0-9]{{1,15}})?) *({'|'.join(BYTES)})( */ *step)?"


class Amount(msgspec.Struct, frozen=True):
    """So many bytes: a step, or held at once. text: as it was written."""

    nbytes: float
    per_step: bool
    text: str


def read_amount(text: str) -> Amount | None:
    """The amount that a text gives, or None."""
    match = re.fullmatch(AMOUNT, text.strip())
    if match is None:
        return None
    number, unit, step = match.groups()
    return Amount(float(Decimal(number) * BYTES[unit]), step is not None, text.strip())


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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


def enough(nbytes: float) -> str:
    """The next amount of two digits that is not below `nbytes`: what a budget would have to be."""
    whole = math.ceil(nbytes)
    scale = 10 ** max(0, len(str(whole)) - 2)
    whole = -(-whole // scale) * scale
    unit = next(u for u in reversed(UNITS) if BYTES[u] <= max(1, whole))
    return f"{Decimal(whole) / BYTES[unit]:f} {unit}"


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
