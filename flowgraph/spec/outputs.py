"""Where a hop may write its outputs: into memory that its readers see, so that nobody copies them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from flowgraph.spec.hop import HopSpec, read_spec
from flowgraph.spec.types import dtype_of

Shape = tuple[int, ...]
Dtypes = Mapping[str, Any]
# What a running hop's arrays are asked of: (function, shapes and dtypes by port) → arrays by port, of those that have a
# place.
Offer = Callable[[Callable[..., Any], Mapping[str, Shape], Dtypes], Mapping[str, Any]]
offered: ContextVar[Offer | None] = ContextVar("offered", default=None)


def outputs(of: Callable[..., Any], *, dtypes: Dtypes | None = None, **sizes: int) -> dict[str, Any]:
    """Arrays for all array outputs of a hop, by port, with whatever lies there: write every element.

    of: the hop itself; sizes: of every dim that its outputs name
    dtypes: of ports whose integers are below a bound, and fit a narrower dtype than the port's: the array has that one,
    or a wider one

    Inside a ring they are its place in shared memory, and nothing is copied when it returns them whole. Elsewhere, the
    second time, and in a thread that the hop started, they are ordinary arrays. They are the hop's until it returns:
    no thread may write them afterwards, and what is to be kept has to be copied. Raises ValueError for a size that is
    missing, is no whole number from 0 on, or that no output has.

        >>> out = outputs(score, leaf=len(bounds) - 1)
        >>> np.add.reduceat(rewards, bounds[:-1], out=out["score"])
        >>> return Scored(**out)
    """
    if not callable(of):
        raise TypeError(f"outputs takes the hop itself first, a function, not {of!r}")
    ports = [port for port in _spec(of).outputs if port.kind == "array"]
    names = frozenset[str]().union(*(dim.names for port in ports for dim in port.shape))
    if odd := sorted(names ^ set(sizes)):
        what = "lack the size of" if odd[0] in names else "have no dim"
        dims = ", ".join(sorted(names)) or "none"
        raise ValueError(f"outputs of {of.__name__} {what} {odd[0]}; give each of: {dims}")
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < 0:
            raise ValueError(f"outputs of {of.__name__}: {name} is {size!r}; give a whole number from 0 on")
    shapes = {port.name: tuple(int(dim.at(sizes)) for dim in port.shape) for port in ports}
    given = {port.name: np.dtype((dtypes or {}).get(port.name, dtype_of(port.dtype))) for port in ports}
    offer = offered.get()
    placed = offer(of, shapes, given) if offer is not None else {}
    return {name: placed[name] if name in placed else np.empty(shapes[name], given[name]) for name in shapes}


def asks(function: Callable[..., Any]) -> frozenset[str] | None:
    """Whether a hop asks for the memory of its outputs, read off its code: None unless it, or a function in it, names
    `outputs`. Where it gives `dtypes`, the words in its code, among which are the ports that it gives them of.
    """
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return None
    codes = [inner.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    names = {name for code in codes for name in code.co_names}
    found = [inner.__globals__.get(name) for name in names]
    modules = [one for one in found if inspect.ismodule(one)] if "outputs" in names else []
    if not any(one is outputs for one in [*found, *(getattr(one, "outputs", None) for one in modules)]):
        return None
    consts = [const for code in codes for const in code.co_consts]
    words = {w for c in consts for w in (c if isinstance(c, tuple) else (c,)) if isinstance(w, str)}
    return frozenset(words if "dtypes" in words else ())


@functools.lru_cache(maxsize=1024)
def _spec(of: Callable[..., Any]) -> HopSpec:
    return read_spec(f"{of.__module__}.{of.__qualname__}", of)
