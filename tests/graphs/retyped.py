"""Hops whose signature differs from a library hop's in the type of one port.

`tests.graphs.retyped.hops__reward__score__uid__2` is hops.reward.score with its port `uid` of type TYPES[2]. Only the
signature is of use: where such a hop runs, its outputs are generated from it. A fold runs as it is.
"""

from __future__ import annotations

import functools
import random
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from jaxtyping import Bool, Float32, Float64, Int8, Int32, Int64

from flowgraph import Array, Event, Json, Latest, Mask, Row, Rows, Scalars, Tensors, Text
from flowgraph.spec.config import import_object
from flowgraph.spec.hop import read_spec

TYPES: tuple[Any, ...] = (
    Float32[Array, "token"],
    Float64[Array, "token"],
    Int32[Array, "token"],
    Int64[Array, "leaf"],
    Float32[Array, "leaf"],
    Int64[Array, "leaf+1"],
    Int8[Array, "leaf+1 sample"],
    Int64[Array, "trajectory"],
    Int32[Array, ""],
    Int64[Array, ""],
    Float32[Array, "prompt+response"],
    Bool[Array, "response"],
    Annotated[Bool[Array, "token"], Mask()],
    Annotated[list[Any], Json("leaf")],
    Annotated[Any, Json()],
    Annotated[list[str], Text("leaf")],
    Annotated[dict[str, Any], Tensors()],
    *(Annotated[Row | None, Rows(kind)] for kind in ("group", "trajectory", "step")),
    *(Annotated[Row | None, Rows(kind), Event()] for kind in ("group", "trajectory", "step")),
    *(Annotated[tuple[Row, ...], Rows(kind), Latest()] for kind in ("group", "trajectory", "step")),
    Annotated[list[Row], Rows("trajectory")],
    Annotated[dict[str, float], Scalars()],
    Annotated[int, Latest()],
    Annotated[float, Latest()],
    Annotated[int, Event()],
)


def variant_of(use: str, rng: random.Random) -> str:
    """The import path of a hop that differs from another in one port, of its inputs and outputs any.

    A fold runs as it is, so only what its body need not know of is changed: the type of an input, not how it is read.
    """
    spec = read_spec(use, import_object(use))
    is_fold = spec.facts.kind == "fold"
    ports = [*spec.inputs, *(() if is_fold else spec.outputs)]
    if not ports:
        return use
    port = rng.choice(ports)
    how = f"{port.mode} rows" if port.mode != "queue" and port.kind == "rows" else port.mode
    numbers = [i for i, hint in enumerate(TYPES) if not is_fold or _how(hint) == how]
    return f"{__name__}.{use.replace('.', '__')}__{port.name}__{rng.choice(numbers)}"


def _how(hint: Any) -> str:
    """How a port is read: a queue, or rows or a value that happen or are sampled."""
    markers = {type(marker).__name__.lower() for marker in getattr(hint, "__metadata__", ())}
    mode = next((mode for mode in ("latest", "event") if mode in markers), "queue")
    return mode if mode == "queue" or "rows" not in markers else f"{mode} rows"


@functools.cache
def __getattr__(name: str) -> Callable[..., Any]:
    """The variant that a name spells. Raises AttributeError for a name that spells none."""
    parts = name.split("__")
    if len(parts) < 5 or parts[0] not in ("hops", "tests"):
        raise AttributeError(name)
    *path, port, number = parts
    function = import_object(".".join(path))
    return _retyped(function, port, TYPES[int(number)])


def _retyped(function: Any, port: str, hint: Any) -> Callable[..., Any]:
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__doc__ = function.__doc__
    copy.__flowgraph__ = function.__flowgraph__  # type: ignore[attr-defined]
    hints = typing.get_type_hints(function, include_extras=True)
    if port in hints:
        hints[port] = hint
    elif hasattr(hints["return"], "_fields"):
        fields = typing.get_type_hints(hints["return"], include_extras=True)
        hints["return"] = NamedTuple(hints["return"].__name__, list((fields | {port: hint}).items()))
    else:
        hints["return"] = hint
    copy.__annotations__ = hints
    return copy
