"""How many rows a step has and how large a dim is at each rate: the numbers that price and allocate.

A step has `group` groups of `sample` trajectories, each of `leaf` leaves (1 unless the graph says more), each of
`token` tokens (prompt+response unless the graph says otherwise). `leaf` and `token` grow with the rows: on
a trajectory they count its own leaves and tokens, on a step those of all its trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from flowgraph.ir.graph import Graph, Node
from flowgraph.spec.dims import Expr, Size, symbol
from flowgraph.spec.forms import PLACE, Bits, PerRow, Prefix, Wire
from flowgraph.spec.ports import Port
from flowgraph.spec.types import dtype_of

Which = Literal["mean", "max"]
WHICH: tuple[Which, ...] = get_args(Which)
# Dims that the ring counts from others: what must have a size where they are used.
COUNTED = {"leaf": (), "trajectory": ("group", "sample"), "token": ("prompt", "response")}


def size_of(name: str, dims: Mapping[str, Size], which: Which, default: float = 1) -> float:
    return float(getattr(dims[name], which)) if name in dims else default


def rows_per_step(kind: str | None, dims: Mapping[str, Size], which: Which = "max") -> float:
    """Rows of a kind that one step consumes: `group`, `group*sample`, or 1."""
    groups = size_of("group", dims, which)
    return {"group": groups, "trajectory": groups * size_of("sample", dims, which)}.get(kind or "step", 1.0)


def dim_values(kind: str | None, dims: Mapping[str, Size], which: Which) -> dict[str, float]:
    """Every dim's value as seen from one row of `kind`."""
    values = {name: float(getattr(size, which)) for name, size in dims.items()}
    trajectories = rows_per_step("trajectory", dims, which) if kind == "step" else 1.0
    leaf = size_of("leaf", dims, which)
    token = size_of(
        "token", dims, which, size_of("prompt", dims, which, 0) + size_of("response", dims, which, 0)
    )
    values |= {"trajectory": trajectories, "leaf": leaf * trajectories, "token": token * leaf * trajectories}
    values.setdefault("group", 1.0)
    values.setdefault("sample", 1.0)
    return values


def evaluate(expr: Expr, kind: str | None, dims: Mapping[str, Size], which: Which) -> float:
    """A dim expression on one row of `kind`. Raises KeyError for a dim without a size."""
    return expr.at(dim_values(kind, dims, which))


def value_bytes(port: Port, kind: str | None, dims: Mapping[str, Size], which: Which) -> float:
    """Bytes of one row's value of a port that is no set of tensors, as the hop gives it."""
    each = dtype_of(port.dtype).itemsize if port.kind == "array" else getattr(port, which)
    return _count(port.shape, kind, dims, which) * float(each)


def stored_bytes(port: Port, wire: Wire, kind: str | None, dims: Mapping[str, Size], which: Which) -> float:
    """Bytes of one row's value as it lies in its block."""
    form = wire.form
    if isinstance(form, Bits):
        return math.ceil(_count(port.shape, kind, dims, which) / 8)
    if port.kind != "array":
        return value_bytes(port, kind, dims, which)
    each = dtype_of(wire.dtype or port.dtype).itemsize
    if isinstance(form, PerRow):
        return each * evaluate(symbol(form.dim), kind, dims, which)
    whole = each * _count(port.shape, kind, dims, which)
    if isinstance(form, Prefix):
        rows = evaluate(symbol("leaf"), kind, dims, which)
        # Leaves of one trajectory have its prompt in common at the least; nothing at all, at the bound.
        common = (rows - 1) * size_of("prompt", dims, "mean", 0) * each if which == "mean" else 0
        return PLACE * max(0.0, rows - 1) + max(0.0, whole - common)
    return whole


def _count(shape: tuple[Expr, ...], kind: str | None, dims: Mapping[str, Size], which: Which) -> float:
    count = 1.0
    for dim in shape:
        count *= evaluate(dim, kind, dims, which)
    return count


def smallest_unsigned(bound: float) -> str | None:
    """The narrowest dtype for integers in [0, bound)."""
    widths = (8, 16, 32)
    return next((f"uint{bits}" for bits in widths if bound <= 2**bits), None)


def alive(kind: str | None, dims: Mapping[str, Size], lag: int) -> int:
    """Rows of a kind alive at once, by what the lag admits: (max_lag + 2) steps of trajectories."""
    if kind in ("group", "trajectory"):
        return int((lag + 2) * rows_per_step(kind, dims)) + 2
    return lag + 3


def slots(graph: Graph, node: Node) -> int:
    """Blocks alive at once: one a live row, and two versions of weights."""
    if node.kind == "step" and any(p.kind == "tensors" for p in node.spec.columns):
        return 2
    return alive(node.kind, graph.dims, graph.max_lag or 0)
