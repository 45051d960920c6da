"""Which part of a column a process reads that has but some of a step's trajectories.

Rows of a trajectory or a group lie in blocks of their own, so it takes the blocks of its own. A column of the whole
step lies in one: along the dim of its rows it is cut, and without one every process reads it whole.
"""

from __future__ import annotations

from typing import NamedTuple

from flowgraph.plan.plan import Column, Hop
from flowgraph.spec.forms import Bits

ROWS = ("trajectory", "leaf", "token")


class Axis(NamedTuple):
    """Where the rows lie in a column of a step. at: of its shape; bounds: it holds `leaf+1` bounds of leaves"""

    at: int
    dim: str
    bounds: bool = False


def axis(column: Column) -> Axis | None:
    """The first axis of a column, as it lies, along which rows do; None for what has none and for what is no array."""
    shape = column.shape if isinstance(column.form, Bits) else column.stored_shape
    for at, dim in enumerate(shape if column.kind == "array" else ()):
        if dim in ROWS:
            return Axis(at, dim)
        if dim.removesuffix("+1") in ROWS:
            return Axis(at, dim.removesuffix("+1"), bounds=True)
    return None


def by_row(hop: Hop) -> bool:
    """Whether a hop gives something for each row, so that of several processes each has a part of it."""
    return any(axis(column) is not None for column in hop.columns)


def readings(processes: int, writer: Hop, column: str) -> int:
    """How many times a column is read in one firing of a reader on so many processes."""
    whole = writer.rows == "step" and axis(writer.column(column)) is None
    return processes if whole else 1
