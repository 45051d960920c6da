"""How a column lies in its block: the forms that passes give it. `runtime/wire.py` has each with its inverse."""

from __future__ import annotations

import msgspec

PLACE = 8  # bytes that say where in a tree a row begins: an earlier row, and how many elements of it


class Bits(msgspec.Struct, frozen=True, tag=True):
    """Booleans, eight a byte."""


class PerRow(msgspec.Struct, frozen=True, tag=True):
    """One value a row: that of its first valid token, or of its last; the reader spreads it out again.

    dim: of the rows; bounds and mask: the writer's ports that say where rows begin and what is valid ("": everything)
    last: only the last valid token has the value, else all have it
    """

    dim: str
    bounds: str
    mask: str
    last: bool


class Prefix(msgspec.Struct, frozen=True, tag=True):
    """Rows as the paths of a tree, each of whose nodes is there once: an i32 pair for every row but the first, then
    what is left of each row. The pair: the earlier row that begins most like it, and how many elements they share.
    """

    bounds: str


class Range(msgspec.Struct, frozen=True, tag=True):
    """Integers in [0, below)."""

    below: int


class Derived(msgspec.Struct, frozen=True, tag=True):
    """What the function at the import path `by` makes of other outputs of the hop."""

    by: str
    sources: tuple[str, ...]


Form = Bits | PerRow | Prefix
Promise = Bits | PerRow | Range | Derived


class Wire(msgspec.Struct, frozen=True):
    """What becomes of one column: whether it lies in a block at all, in which form, in which dtype ("": its own)."""

    written: bool = True
    form: Form | None = None
    dtype: str = ""


PLAIN = Wire()


def ports_of(form: Form | None) -> tuple[str, ...]:
    """The writer's ports without whose values a form can't be undone."""
    if isinstance(form, PerRow):
        return (form.bounds, form.mask) if form.mask else (form.bounds,)
    return (form.bounds,) if isinstance(form, Prefix) else ()
