"""Text and JSON as bytes: what can't be encoded, is too long or would come back as another value is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from flowgraph.errors import PayloadError
from flowgraph.plan.plan import Column, Hop


def encoded(hop: Hop, column: Column, value: Any) -> bytes:
    """The bytes of a text or JSON column: one value, or a list of them. Raises PayloadError naming hop and column."""
    ones = value if column.shape else [value]
    if column.kind == "text":
        _check_text(hop, column, ones)
    try:
        # msgpack: as long as the text is, where JSON escapes it
        encode = msgspec.json.encode if column.kind == "json" else msgspec.msgpack.encode
        raw = encode(value)
        if len(raw) > column.each:
            for one in ones:
                size = len(encode(one) if column.kind == "json" else one.encode())
                if size > column.each:
                    raise too_long(hop, column.name, size, column.each)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"hop {hop.name} gave {column.name} as what is no {column.kind.capitalize()}: {error}"
        raise PayloadError(
            text, "give text, numbers, lists and mappings, of any depth that is finite"
        ) from error
    if column.kind == "json" and b"null" in raw:
        _check_finite(hop, column, value)
    return raw


def too_long(hop: Hop, column: str, size: int, bound: int) -> PayloadError:
    text = f"hop {hop.name} gave {column} of {size} bytes, and its bound is {bound}"
    return PayloadError(text, f"raise max in the annotation of {column} in {hop.place}")


def _check_text(hop: Hop, column: Column, ones: Any) -> None:
    if odd := [one for one in ones if not isinstance(one, str)]:
        text = f"hop {hop.name} gave {column.name} as {type(odd[0]).__name__}, and its port is {column.type}"
        raise PayloadError(text, "give text, or declare the port as Json")


def _check_finite(hop: Hop, column: Column, value: Any) -> None:
    """JSON has no NaN and no infinity, and the encoder writes null for them, which comes back as None."""
    odd = next((x for x in _floats(msgspec.to_builtins(value)) if not math.isfinite(x)), None)
    if odd is not None:
        text = f"hop {hop.name} gave {column.name} with {odd} in it, which JSON does not have"
        raise PayloadError(text, "give None or a text for it, or give it as an array")


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    for one in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    ):
        yield from _floats(one)
