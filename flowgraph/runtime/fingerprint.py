"""A digest of any value, by its content: equal values have equal ones, to the bit.

Objects are read by what they would be pickled from, so random generators and counters show where they stand. What can't
be pickled (locks, loggers, files) says only its type, and the rest of a very large value is left out.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
import types
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

LARGEST = 50_000  # values inside one
CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def fingerprint(value: Any) -> bytes:
    """The digest of a value. Never raises."""
    return _Walk().of(value)


class _Walk:
    """One walk over a value. seen: values on the way here, whose inside is already being looked at."""

    def __init__(self) -> None:
        self.left = LARGEST
        self.seen: dict[int, Any] = {}

    def of(self, value: Any) -> bytes:
        self.left -= 1
        if self.left < 0:
            return b"the rest"
        if id(value) in self.seen:
            return b"itself"
        if isinstance(value, CODE):
            return _digest(b"code", str(getattr(value, "__qualname__", value)).encode())
        self.seen[id(value)] = value
        name = type(value).__qualname__.encode()
        try:
            atom = _atom(value)
            return _digest(name, *(self._inside(value) if atom is None else atom))
        except Exception:  # an object that does not let itself be looked at
            return _digest(b"unread", name)
        finally:
            del self.seen[id(value)]

    def _inside(self, value: Any) -> Iterable[bytes]:
        if isinstance(value, dict):
            return [self.of(one) for item in value.items() for one in item]
        if isinstance(value, list | tuple):
            return [self.of(one) for one in value]
        if isinstance(value, set | frozenset):  # in no order that says anything, so all of it or nothing
            return sorted(self.of(one) for one in value) if len(value) < self.left else [b"%d" % len(value)]
        if isinstance(value, msgspec.Struct):
            return [self.of(getattr(value, name)) for name in value.__struct_fields__]
        made = value.__reduce_ex__(4)
        return [made.encode()] if isinstance(made, str) else [self.of(one) for one in _parts(value, made)]


def _parts(value: Any, made: tuple[Any, ...]) -> list[Any]:
    """What an object would be made of again, without what it computes once and keeps (functools.cached_property)."""
    state, items, pairs = (made[i] if i < len(made) else None for i in (2, 3, 4))
    if isinstance(state, dict):
        kept = functools.cached_property
        state = {
            k: v for k, v in state.items() if not isinstance(getattr(type(value), k, None), kept)
        } or None
    return [*made[:2], state, *(list(some) for some in (items, pairs) if some is not None)]


def _atom(value: Any) -> tuple[bytes, ...] | None:
    """The bytes of what holds no other values; None for what does."""
    if isinstance(value, int):
        return (hex(value).encode(),)  # which has no longest number, as decimal has
    if value is None or isinstance(value, complex | range):
        return (repr(value).encode(),)
    if isinstance(value, float):
        return (struct.pack("<d", value),)
    if isinstance(value, str):
        return (value.encode("utf-8", "surrogatepass"),)
    if isinstance(value, bytes | bytearray | memoryview):
        return (bytes(value),)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype).encode(), str(tuple(value.shape)).encode(), flat.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return str(value.dtype).encode(), str(value.shape).encode(), value.tobytes()
    return None


def _digest(*parts: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()
