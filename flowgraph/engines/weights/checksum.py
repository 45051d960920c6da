"""64 bits that stand for the stored bits of a whole set of tensors, at the speed of reading them.

Each tensor is cut into blocks of 16384 words of 8 bytes. A block's sum is Σ fold(fold(word) · key[i]) mod 2^64, with
odd keys that differ from word to word and fold(x) = x ^ (x >> 32). Each step maps words one to one, so a block in which
one word changed has another sum for certain. Both folds bring high bits down to where the next step still sees them:
without the first, two words that differ in bit 63 alone could change places unseen. Names, dtypes, shapes and all sums,
in the order of names, then go through BLAKE2b.

What it detects: any change within one word, and by it every single element (for BLAKE2b up to 2^-64); any other
accident, such as elements or tensors that changed places, up to about 2^-32. It withstands no one who looks for a
collision on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 1 << 14  # words; with its scratch it stays in a core's own cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Words = npt.NDArray[np.uint64]


def bits(tensor: Tensor) -> npt.NDArray[Any]:
    """The stored bits as flat integers of the same width: [numel]. They share memory with a contiguous CPU tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: npt.NDArray[Any] = flat.view(_INTEGERS[tensor.dtype.itemsize]).numpy()
    return array


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Of the whole set, whatever the mapping's order. See the module for what it detects."""
    total = hashlib.blake2b(digest_size=8)
    scratch = np.empty((2, BLOCK), np.uint64)
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        total.update(np.array([_sum(block, scratch) for block in _blocks(bits(tensor))], "<u8").tobytes())
    return int.from_bytes(total.digest(), "little")


def _blocks(values: npt.NDArray[Any]) -> Iterator[Words]:
    """The words of a tensor, up to BLOCK at a time. The last one is filled up with zeros."""
    raw = values.view(np.uint8)
    whole = len(raw) // 8 * 8
    words = raw[:whole].view("<u8")
    for start in range(0, len(words), BLOCK):
        yield words[start : start + BLOCK]
    if whole < len(raw):
        yield np.frombuffer(raw[whole:].tobytes().ljust(8, b"\0"), "<u8")


def _sum(words: Words, scratch: npt.NDArray[np.uint64]) -> int:
    x, high = scratch[:, : len(words)]
    np.right_shift(words, 32, out=x)
    np.bitwise_xor(x, words, out=x)
    np.multiply(x, _KEYS[: len(words)], out=x)
    np.right_shift(x, 32, out=high)
    np.bitwise_xor(x, high, out=x)
    return int(x.sum())


def _keys() -> Words:
    """[BLOCK] odd numbers: SplitMix64 (Steele et al. 2014), so that every machine has the same."""
    x = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


_KEYS = _keys()
