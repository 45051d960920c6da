"""What bench/seams.py moves, and the hops that move it through arenas: one gives eight tensors, one takes them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float32, Int32, Int64, UInt8, UInt64

from flowgraph import Array, Latest, Scalars, hop, outputs

DTYPES: dict[str, Any] = {
    "ids": np.int64,
    "positions": np.int64,
    "logprobs": np.float32,
    "values": np.float32,
    "advantages": np.float32,
    "hidden": ml_dtypes.bfloat16,
    "lengths": np.int32,
    "experts": np.uint8,
}


def words(nbytes: int) -> int:
    """Words of 8 bytes in each of eight tensors of `nbytes` in all."""
    return nbytes // len(DTYPES) // 8


def tensors(nbytes: int) -> dict[str, Any]:
    """Eight arrays of `words(nbytes)` words each; every page of them is in memory."""
    at = np.arange(words(nbytes), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return {name: (at + np.uint64(i)).view(dtype) for i, (name, dtype) in enumerate(DTYPES.items())}


def stamp(arrays: Mapping[str, Any], run: int) -> None:
    """Make them differ from those of every other run."""
    for array in arrays.values():
        array.view(np.uint64)[0] = run


def checksum(arrays: Mapping[str, Any]) -> int:
    """Of every byte, read once: the words of each tensor summed, and the tensors told apart."""
    sums = [int(arrays[name].view(np.uint64).sum()) for name in DTYPES]
    return sum((2 * i + 1) * one for i, one in enumerate(sums)) % 2**64


def timed(what: Callable[[], object]) -> float:
    began = time.monotonic()
    what()
    return time.monotonic() - began


class Eight(NamedTuple):
    ids: Int64[Array, "word"]
    positions: Int64[Array, "word"]
    logprobs: Float32[Array, "half"]
    values: Float32[Array, "half"]
    advantages: Float32[Array, "half"]
    hidden: BFloat16[Array, "quarter"]
    lengths: Int32[Array, "half"]
    experts: UInt8[Array, "byte"]
    metrics: Annotated[dict[str, float], Scalars()]


@functools.cache
def held(nbytes: int) -> dict[str, Any]:
    """A process's own tensors, made once."""
    return tensors(nbytes)


@functools.cache
def warm(nbytes: int) -> dict[str, Any]:
    """Memory for such tensors, every page of which is there."""
    return {name: np.ones(8 * words(nbytes), np.uint8) for name in DTYPES}


def memcpy(nbytes: int, threads: int) -> float:
    """Seconds of copying the tensors into memory whose pages are there, each thread an equal part of each."""

    def part(at: int) -> None:
        for name, target in warm(nbytes).items():
            cut = slice(at * len(target) // threads, (at + 1) * len(target) // threads)
            np.copyto(target[cut], held(nbytes)[name].view(np.uint8)[cut])

    def all_parts() -> None:
        others = [helpers().submit(part, at) for at in range(1, threads)]
        part(0)
        for other in others:
            other.result()

    warm(nbytes)
    return timed(all_parts)


@functools.cache
def helpers() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    return pool


@hop(lifetime="consumed")
def give(prompt: Int32[Array, "prompt"], *, nbytes: int, place: bool = False) -> Eight:
    """Tensors of this process or, with `place`, such as are written where they will be read.

    given: when the hop returns, seconds; memcpy_1, memcpy_2: see memcpy
    """
    limits = {f"memcpy_{n}": memcpy(nbytes, n) for n in (1, 2)}
    out = held(nbytes)
    if place:
        each = words(nbytes)
        out = outputs(give, word=each, half=2 * each, quarter=4 * each, byte=8 * each)
        for name, array in out.items():
            np.copyto(array, held(nbytes)[name])
    stamp(out, int(prompt[0]))
    high, low = divmod(checksum(out), 2**32)
    return Eight(**out, metrics={**limits, "high": high, "low": low, "given": time.monotonic()})


class Took(NamedTuple):
    sum: UInt64[Array, ""]
    metrics: Annotated[dict[str, float], Scalars()]


@hop(lifetime="consumed")
def take(
    ids: Int64[Array, "word"],
    positions: Int64[Array, "word"],
    logprobs: Float32[Array, "half"],
    values: Float32[Array, "half"],
    advantages: Float32[Array, "half"],
    hidden: BFloat16[Array, "quarter"],
    lengths: Int32[Array, "half"],
    experts: UInt8[Array, "byte"],
) -> Took:
    """The checksum of them all.

    there, taken: when they were there, and were read; local: seconds of reading as many bytes of this process's own
    """
    there = time.monotonic()
    eight = ids, positions, logprobs, values, advantages, hidden, lengths, experts
    total = checksum(dict(zip(DTYPES, eight, strict=True)))
    taken = time.monotonic()
    own = held(sum(array.nbytes for array in eight))
    local = timed(lambda: checksum(own))
    high, low = divmod(total, 2**32)
    times = {"high": high, "low": low, "there": there, "taken": taken, "local": local}
    return Took(np.array(total, np.uint64), times)


class Noted(NamedTuple):
    noted: UInt64[Array, ""]


@hop(lifetime="consumed")
def note(sum: UInt64[Array, ""]) -> Noted:
    """Nearly nothing: what is left is the way there and back."""
    return Noted(sum)


@hop(lifetime="step")
def publish(
    notes: UInt64[Array, "trajectory"],
) -> Annotated[int, Latest(initial=0)]:
    """Who closes the ring."""
    return len(notes)
