"""A firing in flight, and how messages name it."""

from __future__ import annotations

import msgspec

from flowgraph.errors import (
    EngineFailed,
    HiddenState,
    HopError,
    MemoryShort,
    PayloadError,
    PromiseBroken,
    RunError,
)
from flowgraph.runtime.messages import Block, Failed
from flowgraph.runtime.rows import Record
from flowgraph.spec.types import Row

ERRORS: dict[str, type[RunError]] = {
    e.code: e for e in (PayloadError, HopError, PromiseBroken, HiddenState, MemoryShort, EngineFailed)
}


class Firing(msgspec.Struct):
    """One firing in flight.

    watched: the port whose value made it fire, if none of its row did; blocks: what it reads, by writer
    """

    hop: str
    record: Record | None
    leases: dict[str, int]
    began: float
    watched: str = ""
    blocks: dict[str, list[Block]] = {}


def who(firing: Firing, member: int = -1) -> str:
    """The row that a firing works on, for messages."""
    return said_of(firing.record.row, member) if firing.record is not None else ""


def said_of(row: Row, member: int = -1) -> str:
    """A row, for messages. member: which of the rows that a step is made from is meant."""
    if row.kind != "step":
        return f" ({row.kind} {row.key}, uid {row.uid})"
    one = row.parents[member] if member >= 0 else None
    return f" (step {row.key + 1}" + (f", {one.kind} {one.key}, uid {one.uid})" if one else ")")


def error_of(message: Failed, where: str = "") -> RunError:
    """What a worker failed with, raised here as what it was there."""
    error = ERRORS.get(message.code, HopError)(message.error + where, message.help)
    error.__notes__ = [message.detail]
    return error


def with_row(error: RunError, where: str) -> RunError:
    """The same error, and where it was."""
    return type(error)(error.message + where, error.help)
