"""A firing in flight, and how messages name it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flowgraph.errors import (
    EngineFailed,
    HiddenState,
    HopError,
    MemoryShort,
    PayloadError,
    PromiseBroken,
    RunError,
    WorkerDied,
)
from flowgraph.plan.parts import by_row
from flowgraph.plan.plan import Hop
from flowgraph.runtime.messages import Block, Failed, Fire, Join, Part
from flowgraph.runtime.rows import Record
from flowgraph.spec.types import Row

ERRORS: dict[str, type[RunError]] = {
    e.code: e
    for e in (PayloadError, HopError, PromiseBroken, HiddenState, MemoryShort, EngineFailed, WorkerDied)
}


class Firing(msgspec.Struct):
    """One firing in flight.

    watched: the port whose value made it fire, if none of its row did
    fires: what was sent to each process that works on it; parts: of each that has answered, by its place; joining: all
        have, and the first is making one block of what they gave for each row
    """

    hop: str
    record: Record | None
    leases: dict[str, int]
    began: float
    watched: str = ""
    fires: tuple[Fire, ...] = ()
    parts: dict[int, list[Part]] = {}
    joining: bool = False


def joins(hop: Hop, firing: Firing) -> Join | None:
    """What is to be made one block, when all processes have answered; None where the first has written all of it."""
    if len(firing.fires) == 1:
        return None
    shares = [fire.share for fire in firing.fires if fire.share is not None]
    made = [part for rank in range(len(firing.fires)) for part in firing.parts[rank]]
    if not by_row(hop) or made[0].offset < 0:
        return None
    return Join(firing.fires[0].id, hop.name, shares, [Block(part.offset, part.sizes) for part in made])


def with_whole(parts: Mapping[int, list[Part]], whole: list[Part]) -> dict[int, list[Part]]:
    """The same answers, with the whole block as what the first has written."""
    ((first,), (block,)) = parts[0], whole
    of_block = {name: getattr(block, name) for name in ("offset", "nbytes", "sizes")}
    return {**parts, 0: [msgspec.structs.replace(first, seconds=first.seconds + block.seconds, **of_block)]}


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
