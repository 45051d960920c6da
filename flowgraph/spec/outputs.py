"""Where a hop may write its outputs: into memory that its readers see, so that nobody copies them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from flowgraph.spec.hop import HopSpec, read_spec
from flowgraph.spec.types import dtype_of

Shape = tuple[int, ...]
# What a running hop's arrays are asked of: (function, shapes by port) → arrays by port, of those that have a place.
Offer = Callable[[Callable[..., Any], Mapping[str, Shape]], Mapping[str, Any]]
offered: ContextVar[Offer | None] = ContextVar("offered", default=None)


def outputs(of: Callable[..., Any], **sizes: int) -> dict[str, Any]:
    """Arrays for all array outputs of a hop, by port, with whatever lies there: write every element.

    of: the hop itself; sizes: of every dim that its outputs name. Inside a ring they are its place in shared memory,
    and nothing is copied when it returns them whole; elsewhere, and the second time, they are ordinary arrays. They
    are the hop's until it returns. Raises ValueError for a size that is missing, or that no output has.

        >>> out = outputs(score, leaf=len(bounds) - 1)
        >>> np.add.reduceat(rewards, bounds[:-1], out=out["score"])
        >>> return Scored(**out)
    """
    ports = [port for port in _spec(of).outputs if port.kind == "array"]
    names = frozenset[str]().union(*(dim.names for port in ports for dim in port.shape))
    if odd := sorted(names ^ set(sizes)):
        what = "lack the size of" if odd[0] in names else "have no dim"
        dims = ", ".join(sorted(names)) or "none"
        raise ValueError(f"outputs of {of.__name__} {what} {odd[0]}; give each of: {dims}")
    shapes = {port.name: tuple(int(dim.at(sizes)) for dim in port.shape) for port in ports}
    offer = offered.get()
    placed = offer(of, shapes) if offer is not None else {}
    return {
        port.name: placed[port.name]
        if port.name in placed
        else np.empty(shapes[port.name], dtype_of(port.dtype))
        for port in ports
    }


@functools.lru_cache(maxsize=1024)
def _spec(of: Callable[..., Any]) -> HopSpec:
    return read_spec(f"{of.__module__}.{of.__qualname__}", of)
