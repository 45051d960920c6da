"""Everything that crosses a process boundary as a message. Payload never does: it lies in arenas.

The driver writes Setup, Fire, Interrupt, Save and Stop; a worker writes Started, Done, Failed, Gone and Saved. A
Fire and a Done go there and back for every trajectory, so they are short: arrays without names, kinds by number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec


class Block(msgspec.Struct, frozen=True, array_like=True):
    """The descriptor of one row's record of one hop: where it starts in its home's arena, and its sizes (Hop.dims)."""

    offset: int
    sizes: tuple[int, ...] = ()


class Setup(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """First message to a worker: the plan, who it is, where models and logs lie, and the descriptors of the arenas."""

    plan: bytes
    owner: str
    models: dict[str, str]
    arenas: dict[str, int]
    logs: str


class Fire(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Run a hop once, and after it those that fire with it.

    key: of the row it works on (-1: none). blocks: producer → one block a row, in row order
    leaves: leaves of each row, when rows are gathered. values: small inputs by port
    over: hop → offsets of blocks in the worker's arena that nobody reads any more
    omit: "hop.column" not to write this time
    """

    id: int
    hop: str
    key: int
    blocks: dict[str, list[Block]]
    leaves: list[int]
    values: dict[str, Any]
    over: dict[str, list[int]]
    omit: tuple[str, ...] = ()


class Interrupt(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Give up a firing that is under way, if it still is; it will be sent again. It is answered by Gone, or Done."""

    id: int


class Save(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Write the learner's model to a directory."""

    directory: str


class Stop(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """End; the last message to a worker."""


class Started(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The worker holds its resources and takes work."""

    owner: str
    seconds: float


class Part(msgspec.Struct, array_like=True, frozen=True):
    """What one hop gave. One comes of every trajectory, so it says nothing that the plan knows: not which hop it is, no
    names beside counts (their order is the plan's), and no bytes by column, which follow from the sizes.

    offset: of its block in the worker's arena, -1 where it wrote none; nbytes: of the block, see `desk.Stored`
    sizes: Hop.dims, as they really were; read: payload bytes of each of Hop.reads
    driver: the bytes read for which the driver's memory and another process met
    placed: of Hop.written, those that the hop wrote into the block itself; joined: of Hop.reads, those that are no view
    of a block; each a bit, see `bits`
    """

    offset: int
    nbytes: int
    sizes: tuple[int, ...]
    values: dict[str, Any]
    scalars: dict[str, float]
    read: tuple[int, ...]
    driver: int
    seconds: float
    placed: int
    joined: int


def bits(names: Sequence[str], some: Collection[str]) -> int:
    """Some of the names as a number: bit i stands for the i-th."""
    return sum(1 << i for i, name in enumerate(names) if name in some)


def picked(names: Iterable[str], some: int) -> list[str]:
    """The names that stand in a number."""
    return [name for i, name in enumerate(names) if some >> i & 1]


class Done(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """A firing ended well. parts: of each hop that fired, in order."""

    id: int
    parts: list[Part]


class Failed(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """A firing (or, with id -1, the worker's start or save) raised. code: of the RunError it becomes.

    member: which of the rows that a step is made from is at fault, when that is known, else -1
    """

    id: int
    code: str
    error: str
    help: str
    detail: str
    member: int = -1


class Gone(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """A firing on a trajectory that came to nothing, for a reason that is counted, or "" when it was interrupted."""

    id: int
    reason: str


class Saved(msgspec.Struct, tag=9, array_like=True, frozen=True):
    directory: str


ToWorker = Setup | Fire | Interrupt | Save | Stop
FromWorker = Started | Done | Failed | Gone | Saved
_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    return _from_worker.decode(data)
