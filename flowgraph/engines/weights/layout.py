"""Tensors in one buffer, laid out as a safetensors file: written by us in place, read by whoever reads that format.

A file is 8 bytes of header length (little-endian), a JSON header padded with spaces to a multiple of 8, then the
tensors without a hole, in the header's order. Wide dtypes come first, so that each tensor is aligned to its dtype.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from mmap import mmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview | mmap

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U32": torch.uint32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor of a named set."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def entries(tensors: Mapping[str, Tensor]) -> list[Entry]:
    """The table of a set."""
    return [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def header(table: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """→ the first bytes of a file that holds the table, and the bytes of the whole file.

    Raises ValueError for a name that is taken twice or reserved, or a dtype that the format doesn't have.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in sorted(table, key=lambda entry: (-entry.dtype.itemsize, entry.name)):
        if entry.name in fields or entry.name == "__metadata__":
            raise ValueError(f"tensor {entry.name}: the name is there twice, or is the format's own")
        if entry.dtype not in _NAMES:
            raise ValueError(f"tensor {entry.name}: {entry.dtype} has no place in a safetensors file")
        start, end = end, end + entry.nbytes
        fields[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + end


def views(buffer: Buffer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A whole file in memory → its tensors, which share the buffer's memory, and its metadata.

    A buffer that can't be written to is copied first. Raises ValueError for what is no such file.
    """
    with memoryview(buffer) as view:
        if view.readonly:
            buffer = bytearray(view)
        size = view.nbytes
    try:
        start = 8 + int.from_bytes(buffer[:8], "little")
        fields = json.loads(bytes(buffer[8:start]))
        metadata = fields.pop("__metadata__", {})
        tensors = {
            name: _view(buffer, DTYPES[field["dtype"]], field["shape"], start + field["data_offsets"][0])
            for name, field in fields.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a buffer of {size} bytes is no safetensors file: {error}") from error
    return tensors, metadata


def _view(buffer: Buffer, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
    count = math.prod(shape)
    if not count:  # which frombuffer refuses
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


def check_same(held: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """ValueError naming the first tensor, by name, that only one set has or that differs in shape or dtype."""
    for name in sorted(held.keys() | given.keys()):
        if name not in given:
            raise ValueError(f"tensor {name} is missing")
        if name not in held:
            raise ValueError(f"tensor {name} is unknown: the set has no such name")
        ours, theirs = held[name], given[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise ValueError(
                f"tensor {name} is {theirs.dtype}{list(theirs.shape)}, not {ours.dtype}{list(ours.shape)}"
            )
