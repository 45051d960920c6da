"""`budgets:`: the most bytes that an owner, a seam, a transport or all arenas may take."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from flowgraph.errors import Place
from flowgraph.spec.reader import Reader, shown
from flowgraph.spec.source import Located
from flowgraph.spec.units import BYTES, Amount, read_amount

ARENAS = "/dev/shm"  # all arenas together: the shared memory of a run
ARROW = re.compile(r"\s*(?:->|→)\s*")


class BudgetDecl(msgspec.Struct, frozen=True):
    """One amount under `budgets:`. at: where its name stands; amount: None when it can't be read."""

    name: str
    at: Place
    amount: Amount | None
    place: Place

    @property
    def seam(self) -> tuple[str, str] | None:
        """The source and the reader, when the name is that of a seam."""
        ends = ARROW.split(self.name.strip())
        return (ends[0], ends[1]) if len(ends) == 2 else None


def read_budgets(reader: Reader, node: Located | None) -> Iterator[BudgetDecl]:
    """`name: amount`, or a list of amounts."""
    values, _ = reader.section(node, "budgets")
    for name, value in values.items():
        assert node is not None
        many = value.value if isinstance(value.value, list) and value.value else [value]
        for one in many:
            yield BudgetDecl(name, node.keys[name], _amount(reader, name, one), one.place)


def _amount(reader: Reader, name: str, node: Located) -> Amount | None:
    value = node.value
    if node.unread:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return Amount(float(value), False, f"{value} B")
    amount = read_amount(value) if isinstance(value, str) else None
    if amount is None:
        meant = _mended(str(value))
        hint = f"did you mean {meant}? " if meant else ""
        help = f"{hint}write bytes a step as 64 KB/step, or bytes held at once as 2 GB; units: {', '.join(BYTES)}"
        reader.error("FG503", node.place, f"budgets.{name}: {shown(node)} is no amount of bytes", help)
    return amount


def _mended(text: str) -> str | None:
    """What was meant by `64kb / s` or `2 g`."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    word = match[2].lower() if match else ""
    unit = next((u for u in BYTES if word in (u.lower(), u.lower().removesuffix("b"))), None)
    return f"{match[1]} {unit}{'/step' if '/' in text else ''}" if match and unit else None
