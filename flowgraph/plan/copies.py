"""Copies on the way of a byte: into its writer's block, through the driver's memory, and out to what a hop reads.

What a plan can know of them. A run counts those that there really were, see `measured.Copied`.
"""

from __future__ import annotations

import msgspec

from flowgraph.passes.sizes import rows_per_step
from flowgraph.plan.plan import Column, Hop, Plan, Read


class Copies(msgspec.Struct, frozen=True):
    """How often each byte of a value is copied, or how many bytes of all are, at the three places.

    writer: 0 where a hop writes its output into its block itself (`flowgraph.outputs`)
    driver: 0 where its memory is passed by; reader: 0 where a hop reads the value as it lies in the block
    """

    writer: float
    driver: float
    reader: float

    @property
    def total(self) -> float:
        return self.writer + self.driver + self.reader

    @property
    def text(self) -> str:
        """`in place`, `1 copy`, `1.5 copies`"""
        total = round(self.total, 2)
        return f"{total:g} {'copy' if total == 1 else 'copies'}" if total else "in place"


def placed(hop: Hop) -> tuple[Column, ...]:
    """The columns that a hop may write into its block itself, in the dtype in which they are stored: those that have no
    other form there, as far as the place of a column follows from the sizes of its arrays alone.
    """
    known = {dim for column in hop.columns if column.kind == "array" for dim in column.shape}
    found = []
    for column in hop.written:
        if column.opaque or not set(column.stored_shape) <= known:
            break
        if column.form is None:
            found.append(column)
    return tuple(found)


def copies(plan: Plan, reader: Hop, one: Read) -> Copies | None:
    """Of a value that a hop reads, as the plan has it; None where no byte of it crosses by itself.

    A hop that asks for the memory of its outputs is taken to write them there (`Hop.in_place`). A reader copies what it
    joins of several rows or decodes, and a fold all that it may keep.
    """
    if not one.crosses:
        return None
    writer = plan.hops[one.producer]
    column = writer.column(one.column)
    in_place = column.name in _in_place(writer)
    lies = column.kind == "tensors" or (column.kind == "array" and one.as_it_lies(column))
    read_there = lies and one.gather == "same" and reader.kind != "fold"
    return Copies(0 if in_place else 1, 0 if writer.home == writer.owner else 1, 0 if read_there else 1)


def copied(plan: Plan) -> Copies:
    """Mean bytes that all seams of a plan copy in a step."""
    writer = driver = reader = 0.0
    for hop in plan.hops.values():
        own = _in_place(hop)
        for column in hop.written:
            nbytes = column.mean_bytes * _times(plan, hop, column)
            writer += 0 if column.name in own else nbytes
            driver += 0 if hop.home == hop.owner else nbytes
    reads = {(hop.name, one.port): one for hop in plan.hops.values() for one in hop.reads}
    for seam in plan.seams:
        for field in seam.fields:
            made = copies(plan, plan.hops[seam.reader], reads[seam.reader, field.port])
            reader += field.mean_bytes * made.reader if made else 0
    return Copies(writer, driver, reader)


def _in_place(hop: Hop) -> set[str]:
    return {column.name for column in placed(hop) if column.name in hop.in_place} if hop.in_place else set()


def _times(plan: Plan, hop: Hop, column: Column) -> float:
    """How often a column is written in a step. A set of tensors is not, where every reader skips that step."""
    readers = [reader.every for reader, _ in plan.readers(hop.name, column.name)]
    every = min(readers, default=1) if column.kind == "tensors" else hop.every
    return rows_per_step(hop.rows, plan.dims, "mean") / every
