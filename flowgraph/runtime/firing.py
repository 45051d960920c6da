"""A firing in flight, and how messages name it."""

from __future__ import annotations

import msgspec

from flowgraph.errors import HopError, PayloadError, RunError
from flowgraph.runtime.messages import Block, Failed
from flowgraph.runtime.rows import Record

ERRORS: dict[str, type[RunError]] = {e.code: e for e in (PayloadError, HopError)}


class Firing(msgspec.Struct):
    """One firing in flight.

    holds: the value that it works on, which is not overwritten meanwhile; blocks: what it reads, by writer
    """

    hop: str
    record: Record | None
    leases: dict[str, int]
    began: float
    holds: tuple[str, str] | None = None
    blocks: dict[str, list[Block]] = {}


def who(firing: Firing) -> str:
    """The row that a firing works on, for messages."""
    if firing.record is None:
        return ""
    row = firing.record.row
    return f" (step {row.key + 1})" if row.kind == "step" else f" ({row.kind} {row.key}, uid {row.uid})"


def error_of(message: Failed, where: str = "") -> RunError:
    """What a worker failed with, raised here as what it was there."""
    error = ERRORS.get(message.code, HopError)(message.error + where, message.help)
    error.__notes__ = [message.detail]
    return error
