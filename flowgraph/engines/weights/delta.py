"""What a step changed: the elements whose stored bits differ, and nothing else. Lossless.

Small steps in bfloat16 leave most elements as they were, because float32 masters move by less than half of what
bfloat16 can tell apart. Bits decide, not values: -0.0 in place of 0.0 is a change, a NaN that stays is none.

A changed tensor is its new values beside their positions, as a bit per element or four bytes per value, whichever is
less (the bits above a share of 1/32). A tensor that didn't change costs nothing.

A delta fits one base only. Its version is compared before anything is written; a base that has the version and not the
weights shows in the checksum of the result, which covers the whole set. Either is a `DeltaMismatch`: push in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Relative, because a server's loader has these modules under another name; see served/sglang_loader.
from .checksum import bits, checksum
from .layout import Buffer, check_same, entries, header, views

PIECE = 1 << 20  # elements


class DeltaMismatch(ValueError):
    """A delta doesn't fit the weights that it was applied to, which may be half changed. Push them in full."""


class Change(NamedTuple):
    """New values of one tensor: [changed] in its dtype, and where they go.

    at: [changed] positions in the flat tensor (uint32), or one bit an element (uint8, first element highest).
    """

    at: npt.NDArray[Any]
    values: Tensor


@dataclass(frozen=True)
class Delta:
    """From the weights of version `base` to those of `version`.

    checksum: of the complete new set. elements: of the complete set, changed or not. changes: by name of tensor.
    """

    base: int
    version: int
    checksum: int
    elements: int
    changes: dict[str, Change]

    @property
    def nbytes(self) -> int:
        """Of positions and values."""
        return sum(change.at.nbytes + change.values.nbytes for change in self.changes.values())

    @property
    def changed(self) -> float:
        """The share of all elements that changed, 0 to 1."""
        count = sum(change.values.numel() for change in self.changes.values())
        return count / self.elements if self.elements else 0.0


def encode(old: Mapping[str, Tensor], new: Mapping[str, Tensor], *, base: int, version: int) -> Delta:
    """The delta from `old` (version `base`) to `new`. Values are copied out of `new`.

    Raises ValueError naming the first tensor that the two sets don't share, or that differs in shape or dtype.
    """
    check_same(old, new)
    changes = {}
    for name, tensor in new.items():
        before, after = bits(old[name]), bits(tensor)
        differs = before != after
        count = int(np.count_nonzero(differs))
        if not count:
            continue
        if 4 * count < len(after) / 8:
            at = np.flatnonzero(differs)
            changes[name] = Change(at.astype(np.uint32), torch.from_numpy(after[at]).view(tensor.dtype))
        else:
            values = np.concatenate([after[at] for at in _places(differs)])
            changes[name] = Change(np.packbits(differs), torch.from_numpy(values).view(tensor.dtype))
    return Delta(base, version, checksum(new), sum(t.numel() for t in new.values()), changes)


def apply(delta: Delta, tensors: Mapping[str, Tensor], *, at: int) -> None:
    """Bring `tensors`, which hold version `at`, to `delta.version` in place. They must be contiguous, on the CPU.

    Raises DeltaMismatch when `at` isn't the delta's base or a tensor isn't like the delta's, and then nothing has
    changed; and when the result isn't the set that was encoded, and then the tensors hold no version at all.
    """
    if at != delta.base:
        raise DeltaMismatch(f"the delta is from version {delta.base}, and the weights are of version {at}")
    for name, change in delta.changes.items():
        _check(name, change, tensors.get(name))
    for name, change in delta.changes.items():
        _write(bits(tensors[name]), change.at, bits(change.values))
    if checksum(tensors) != delta.checksum:
        raise DeltaMismatch(
            f"the weights that became version {delta.version} are not those that were encoded"
        )


def _check(name: str, change: Change, tensor: Tensor | None) -> None:
    """DeltaMismatch unless `change` can be written to `tensor`."""
    if tensor is None:
        raise DeltaMismatch(f"tensor {name} of the delta is not among the weights")
    if tensor.dtype != change.values.dtype:
        raise DeltaMismatch(f"tensor {name} is {tensor.dtype}, and the delta has {change.values.dtype}")
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"tensor {name} must be contiguous and on the CPU: apply to a copy that is")
    count = change.values.numel()
    if change.at.dtype == np.uint8:
        right = len(change.at) == -(-tensor.numel() // 8)
        fits = (
            right and np.count_nonzero(np.unpackbits(change.at.view(np.uint8), count=tensor.numel())) == count
        )
    else:
        fits = len(change.at) == count and int(change.at.max(initial=0)) < tensor.numel()
    if not fits:
        raise DeltaMismatch(
            f"tensor {name} has {tensor.numel()} elements, which the delta's positions don't fit"
        )


def _write(target: npt.NDArray[Any], at: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    if at.dtype == np.uint32:
        target[at] = values
        return
    done = 0
    for places in _places(np.unpackbits(at, count=len(target)).view(np.bool_)):
        target[places] = values[done : done + len(places)]
        done += len(places)


def _places(mask: npt.NDArray[np.bool_]) -> Iterator[npt.NDArray[np.intp]]:
    """Where the mask is set, a piece at a time: positions take eight times the mask's memory, and indexing by them
    is several times as fast as by the mask.
    """
    for start in range(0, len(mask), PIECE):
        yield np.flatnonzero(mask[start : start + PIECE]) + start


def pack(delta: Delta) -> bytearray:
    """One buffer, a safetensors file: `at/<name>` and `values/<name>` of each change, the rest as metadata."""
    tensors = {f"at/{name}": torch.from_numpy(change.at) for name, change in delta.changes.items()}
    tensors |= {f"values/{name}": change.values for name, change in delta.changes.items()}
    numbers = {"base": delta.base, "version": delta.version, "elements": delta.elements}
    metadata = {name: str(number) for name, number in numbers.items()} | {
        "checksum": f"{delta.checksum:016x}"
    }
    start, size = header(entries(tensors), metadata)
    buffer = bytearray(size)
    buffer[: len(start)] = start
    for name, target in views(buffer)[0].items():
        target.copy_(tensors[name])
    return buffer


def unpack(buffer: Buffer) -> Delta:
    """The inverse of `pack`, without a copy if the buffer can be written to. Raises ValueError if it is damaged."""
    tensors, metadata = views(buffer)
    try:
        base, version, elements = (int(metadata[name]) for name in ("base", "version", "elements"))
        names = [name.removeprefix("at/") for name in tensors if name.startswith("at/")]
        changes = {name: Change(tensors[f"at/{name}"].numpy(), tensors[f"values/{name}"]) for name in names}
        return Delta(base, version, int(metadata["checksum"], 16), elements, changes)
    except KeyError as error:
        raise ValueError(f"a buffer without {error} holds no delta") from error
