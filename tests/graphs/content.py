"""Values of drawn columns: a function of a hash of all that a hop read, and true to every promise of the column."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from flowgraph import Below, Derivable, LastToken, Mask, Shared, TiledOver
from flowgraph.passes.sizes import evaluate
from flowgraph.spec.dims import Size, parse
from flowgraph.spec.types import Fact, dtype_of

A = npt.NDArray[Any]
ENCODE = {"text": msgspec.msgpack.encode, "json": msgspec.json.encode}


class Col(NamedTuple):
    """One column: kind array, text or json. max: bytes of one text or JSON value, which is its mean as well."""

    name: str
    kind: str
    shape: str
    dtype: str = ""
    facts: tuple[Fact, ...] = ()
    max: int = 0

    @property
    def bounds(self) -> bool:
        """Whether it says where leaves begin."""
        return self.kind == "array" and self.shape == "leaf+1"


class Scene(NamedTuple):
    """What a value is made in: sizes by dim, the hop's rows, the graph's dims, and whether data fills them."""

    sizes: Mapping[str, int]
    rows: str
    dims: Mapping[str, Size]
    full: bool


def digest(values: Mapping[str, Any]) -> bytes:
    """A hash of every bit of every value, with its name, dtype and shape."""
    state = hashlib.blake2b(digest_size=16)
    for name, value in sorted(values.items()):
        array = isinstance(value, np.ndarray | np.generic)
        data = np.asarray(value).tobytes() if array else msgspec.json.encode(value)
        kind = f"{value.dtype} {np.shape(value)}" if array else type(value).__name__
        state.update(f"{name} {kind} {len(data)} ".encode() + data)
    return state.digest()


def as_float(hashed: bytes) -> float:
    """52 bits of a hash, which a float holds exactly."""
    return float(int.from_bytes(hashed[:8], "little") >> 12)


def make(column: Col, scene: Scene, rng: np.random.Generator, env: Mapping[str, Any]) -> Any:
    """A value of a column. env: what the hop read and has made so far, by port."""
    shape = tuple(int(parse(d).at(scene.sizes)) for d in column.shape.split())
    if column.kind != "array":
        return _texts(column, shape, rng, scene.full)
    if column.bounds:
        return _bounds(column, scene, rng)
    facts = {type(f): f for f in column.facts}
    if derivable := facts.get(Derivable):
        assert isinstance(derivable, Derivable)
        return derivable.by(*(env[name] for name in derivable.sources))

    def some(count: tuple[int, ...]) -> A:
        return _random(column, count, scene, rng)

    for kind in (LastToken, TiledOver):
        if isinstance(fact := facts.get(kind), LastToken | TiledOver):
            return _per_row(fact, shape[0], env, some)
    if isinstance(shared := facts.get(Shared), Shared):
        return _shared(column, env[shared.bounds], scene, rng, some)
    return some(shape)


def _random(column: Col, shape: tuple[int, ...], scene: Scene, rng: np.random.Generator) -> A:
    """Any bits that the dtype has, NaN and -0.0 among them; integers below the bound where there is one."""
    dtype = dtype_of(column.dtype)
    if column.dtype == "bool":
        return rng.random(shape) < rng.choice([0.0, 0.4, 0.8, 1.0])
    below = next((f for f in column.facts if isinstance(f, Below)), None)
    if below is not None:
        most = min(evaluate(parse(below.bound), scene.rows, scene.dims, "max"), np.iinfo(dtype).max)
        return rng.integers(0, int(most), shape).astype(dtype)
    if rng.random() < 0.2 and dtype.kind != "i" and "float" in column.dtype:
        return rng.choice(np.array([0.0, -0.0, 1.0, np.nan], dtype), shape)
    count = int(np.prod(shape, dtype=np.int64))
    return rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def _bounds(column: Col, scene: Scene, rng: np.random.Generator) -> A:
    """The tokens cut into leaves: even ones where data fills its dims, else anywhere."""
    leaves, tokens = scene.sizes["leaf"], scene.sizes["token"]
    if scene.full:
        return (np.arange(leaves + 1) * (tokens // leaves)).astype(column.dtype)
    cuts = np.sort(rng.integers(0, tokens + 1, leaves - 1))
    return np.concatenate([[0], cuts, [tokens]]).astype(column.dtype)


def _per_row(
    fact: LastToken | TiledOver, length: int, env: Mapping[str, Any], some: Callable[[tuple[int, ...]], A]
) -> A:
    """Row by row, as plainly as it can be said; `runtime/wire.py` does it otherwise."""
    bounds = env[fact.bounds]
    values = some((len(bounds) - 1,))
    out = np.zeros(length, values.dtype)
    for value, (start, end) in zip(values, pairwise(bounds), strict=True):
        valid = [i for i in range(start, end) if not fact.mask or env[fact.mask][i]]
        for i in valid[-1:] if isinstance(fact, LastToken) else valid:
            out[i] = value
    return out


def _shared(
    column: Col, bounds: A, scene: Scene, rng: np.random.Generator, some: Callable[[tuple[int, ...]], A]
) -> A:
    """Leaves that begin alike: with just the prompt where data fills its dims, else with any part of the one before."""
    out = some((int(bounds[-1]),))
    first = out[: bounds[1]].copy()
    first, other = first.view(f"u{first.itemsize}"), out.view(f"u{out.itemsize}")
    for i, (start, end) in enumerate(pairwise(bounds)):
        row, before = other[start:end], other[bounds[max(0, i - 1)] : start]
        if scene.full:
            prompt = scene.dims["prompt"].max
            row[:prompt] = first[:prompt]
            row[prompt : prompt + 1] = i  # in no two leaves the same
        else:
            same = int(rng.integers(0, min(len(row), len(before)) + 1))
            row[:same] = before[:same]
    return out


def _texts(column: Col, shape: tuple[int, ...], rng: np.random.Generator, full: bool) -> Any:
    """Text, or any JSON; where data fills its dims, as many bytes as priced."""
    count = shape[0] if shape else 1
    if full:
        length = column.max - 1
        texts = ["".join(rng.choice(list("xyz"), length)) for _ in range(count)]
        at = 0
        while len(ENCODE[column.kind](texts if shape else texts[0])) > column.max * count:
            texts[at % count] = texts[at % count][:-1]
            at += 1
        return texts if shape else texts[0]
    values = [_value(column, rng) for _ in range(count)]
    return values if shape else values[0]


def _value(column: Col, rng: np.random.Generator) -> Any:
    text = "".join(rng.choice(list('aé"\n☃'), int(rng.integers(0, column.max // 5))))
    if column.kind == "text":
        return text
    values = [None, int(rng.integers(-9, 9)), [1.5, True], {"é": [text[:2]]}, text[:2]]
    return [v for v in values if len(msgspec.json.encode(v)) <= column.max][int(rng.integers(0, 3))]


# --- what can be derived ---------------------------------------------------------------------------------------


def _raw(arrays: tuple[A, ...]) -> A:
    total = np.zeros(np.shape(arrays[0]), np.uint64)
    for array in arrays:
        bits = np.asarray(array).view(f"u{np.asarray(array).dtype.itemsize}")
        total = (total >> np.uint64(1)) ^ bits.astype(np.uint64)
    return total


def mixed(*arrays: A) -> A:
    return (_raw(arrays) % np.uint64(251)).astype(np.int64)


def parity(*arrays: A) -> A:
    return (_raw(arrays) & np.uint64(1)).astype(np.bool_)


def halves(*arrays: A) -> A:
    return ((_raw(arrays) % np.uint64(2000)).astype(np.float32)) / np.float32(2)


DERIVED = {"int64": mixed, "bool": parity, "float32": halves}
MASK = Mask()
