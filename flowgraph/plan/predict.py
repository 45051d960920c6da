"""What a plan says that a run reads, at the lengths that there really were: the audit's middle column."""

from __future__ import annotations

from collections.abc import Mapping

from flowgraph.plan.layout import spans
from flowgraph.plan.parts import readings
from flowgraph.plan.plan import Hop, Plan
from flowgraph.plan.taken import takes

# Reader → writer → sizes of a block, joined by commas → how many such blocks it read; as a run records them.
Lengths = Mapping[str, Mapping[str, Mapping[str, int]]]


def predict(plan: Plan, lengths: Lengths) -> dict[str, int]:
    """`reader.port` → bytes over the whole run.

    A column's dims are evaluated at the recorded sizes, as its form and dtype lie there. What is handed on or derived
    is 0, and what the form of a column takes besides is counted once, as the seams are priced.
    """
    out: dict[str, int] = {}
    for hop in plan.hops.values():
        read, processes = lengths.get(hop.name, {}), plan.processes(hop)
        for port, taken in takes(hop.reads).items():
            parts = [(plan.hops[one.producer], one.column, read.get(one.producer, {})) for one in taken]
            out[f"{hop.name}.{port}"] = sum(
                readings(processes, writer, column) * column_bytes(writer, column, blocks)
                for writer, column, blocks in parts
            )
    return out


def column_bytes(writer: Hop, column: str, blocks: Mapping[str, int]) -> int:
    """Bytes of one column over blocks of the given sizes. blocks: sizes, joined by commas → how many."""
    total = 0
    for text, count in blocks.items():
        sizes = dict(zip(writer.dims, map(int, text.split(",")), strict=True)) if text else {}
        total += spans(writer, sizes)[column].nbytes * count
    return total
