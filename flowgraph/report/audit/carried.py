"""What a single controller carries, raw and as base64, by the plan that `plan.naive` makes of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowgraph.passes.sizes import dim_values
from flowgraph.plan.plan import Column, Hop, Plan, SeamField
from flowgraph.report.audit.rows import Carried

Key = tuple[str, str]  # reader, port


def base64_bytes(nbytes: float) -> int:
    """Characters that base64 makes of one value (RFC 4648: four of every three bytes begun)."""
    return 4 * math.ceil(nbytes / 3)


def carried(naive: Plan) -> dict[Key, Carried]:
    """(reader, port) → what crosses of it. Sets of tensors are left out: weights go past every controller."""
    return {
        (seam.reader, field.port): _field(naive, field)
        for seam in naive.seams
        for field in seam.fields
        if naive.hops[field.producer].column(field.column).kind != "tensors"
    }


def total(naive: Plan, fields: dict[Key, Carried]) -> Carried:
    """Of the whole graph, what nobody reads included."""
    unread = list(_unread(naive))
    return add([*fields.values(), *unread])


def add(parts: list[Carried]) -> Carried:
    return Carried(
        sum(p.read_raw for p in parts),
        sum(p.read_base64 for p in parts),
        sum(p.controller_raw for p in parts),
        sum(p.controller_base64 for p in parts),
    )


def _field(naive: Plan, field: SeamField) -> Carried:
    writer = naive.hops[field.producer]
    column = writer.column(field.column)
    raw, text = column.mean_bytes, _text(column)
    tokens = _tokens(naive, writer, column)
    return Carried(
        field.mean_bytes,
        _times(field.mean_bytes, raw, text),
        field.driver[0],
        _times(field.driver[0], raw, text),
        raw / tokens if tokens else None,
        text / tokens if tokens else None,
    )


def _unread(naive: Plan) -> Iterator[Carried]:
    read = {(f.producer, f.column) for s in naive.seams for f in s.fields}
    for name, (through, _) in naive.unread.items():
        hop = naive.hops[name]
        columns = [c for c in hop.written if (name, c.name) not in read and c.kind != "tensors"]
        raw = sum(c.mean_bytes for c in hop.written if (name, c.name) not in read)
        rows = through / raw if raw else 0.0
        for column in columns:
            yield Carried(0.0, 0.0, rows * column.mean_bytes, rows * _text(column))


def _text(column: Column) -> float:
    """One value as a JSON reply holds it: arrays as base64, texts as they are."""
    return base64_bytes(column.mean_bytes) if column.kind == "array" else column.mean_bytes


def _times(nbytes: float, raw: float, text: float) -> float:
    return nbytes / raw * text if raw else 0.0


def _tokens(naive: Plan, writer: Hop, column: Column) -> float:
    """How many tokens one value has, 0 when its shape names none."""
    if "token" not in column.shape:
        return 0.0
    return dim_values(writer.rows, naive.dims, "mean")["token"]
