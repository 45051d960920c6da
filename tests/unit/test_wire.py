"""Forms and promises: what keeps its promise comes back bit for bit, and what does not is found."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowgraph.errors import PromiseBroken
from flowgraph.plan.plan import Column
from flowgraph.runtime import wire
from flowgraph.spec.forms import PLACE, Bits, Derived, Form, PerRow, Prefix, Promise, Range
from flowgraph.spec.types import INTEGERS, dtype_of

A = npt.NDArray[Any]
FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]
DTYPES = [*FLOATS, *INTEGERS, "bool"]
NEGATED = Derived("numpy.negative", ("source",))


def column(
    dtype: str, shape: tuple[str, ...] = ("token",), form: Form | None = None, stored: str = "", **more: Any
) -> Column:
    return Column(
        "x", "array", dtype, shape, "", ("Fact",), 0, 0, True, True, form, stored or dtype, shape, **more
    )  # fmt: skip


def crossed(one: Column, value: A, env: dict[str, Any], narrow: bool = False) -> A:
    """The value after crossing: a reader has nothing but bytes, which it may not write to."""
    raw = wire.pack("h", one, value, env)
    dtype = np.dtype(np.uint8) if isinstance(one.form, Bits | Prefix) else dtype_of(one.stored)
    stored: A = np.frombuffer(raw.tobytes(), dtype)
    stored = stored if isinstance(one.form, Bits | Prefix) else stored.reshape(raw.shape)
    return wire.unpack(one, stored, value.shape, env, narrow)


def bits(value: A) -> tuple[str, tuple[int, ...], bytes]:
    return str(value.dtype), value.shape, value.tobytes()


def patterns(dtype: str) -> st.SearchStrategy[bytes]:
    """One element as bytes: few enough that elements are often equal, and among them -0.0, NaN and the extremes."""
    size = dtype_of(dtype).itemsize
    if dtype == "bool":
        return st.sampled_from([b"\0", b"\1"])
    edges = [b"\0" * size, b"\0" * (size - 1) + b"\x80", b"\xff" * size, b"\1" + b"\0" * (size - 1)]
    return st.sampled_from(edges) | st.binary(min_size=size, max_size=size)


class Rows(msgspec.Struct):
    """Rows of some lengths, what is valid in them, and a value whose elements are of any bits."""

    dtype: str
    env: dict[str, Any]
    value: A

    @property
    def rows(self) -> list[tuple[int, int]]:
        return list(pairwise(self.env["bounds"].tolist()))


@st.composite
def packed(draw: st.DrawFn, dtypes: list[str] = DTYPES, tails: bool = True) -> Rows:
    lengths = draw(st.lists(st.integers(0, 4), max_size=4))
    bounds = np.cumsum([0, *lengths]).astype(draw(st.sampled_from(["int64", "int32", "uint64", "uint8"])))
    n = sum(lengths)
    mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
    dtype = draw(st.sampled_from(dtypes))
    tail = draw(st.sampled_from([(), (1,), (2,)])) if tails else ()
    count = n * int(np.prod(tail, dtype=np.int64))
    raw = b"".join(draw(st.lists(patterns(dtype), min_size=count, max_size=count)))
    value: A = np.frombuffer(raw, dtype_of(dtype)).reshape(n, *tail)
    return Rows(dtype, {"bounds": bounds, "mask": mask}, value)


def kept(made: Rows, promise: PerRow) -> A:
    """The value that keeps a promise and is like this one in what the promise leaves open, told token by token."""
    out = np.zeros_like(made.value)
    for start, end in made.rows:
        valid = [t for t in range(start, end) if not promise.mask or made.env["mask"][t]]
        for t in valid[-1:] if promise.last else valid:
            out[t] = made.value[t if promise.last else valid[0]]
    return out


PER_ROW = [PerRow("leaf", "bounds", mask, last) for mask in ("", "mask") for last in (True, False)]


@given(packed(), st.sampled_from(PER_ROW))
def test_one_value_a_row_comes_back_bit_for_bit(made: Rows, form: PerRow) -> None:
    value = kept(made, form)
    one = column(made.dtype, form=form)
    assert bits(crossed(one, value, made.env)) == bits(value)
    assert len(wire.pack("h", one, value, made.env)) == len(made.rows)


@given(packed(), st.sampled_from(PER_ROW))
def test_a_value_that_is_not_one_a_row_is_found_and_only_that(made: Rows, promise: PerRow) -> None:
    one = column(made.dtype, promises=(promise,))
    wanted = kept(made, promise)
    wire.verify("h", one, wanted, made.env)
    if bits(wanted) == bits(made.value):
        wire.verify("h", one, made.value, made.env)
        return
    size = made.value.itemsize
    given, should = made.value.tobytes(), wanted.tobytes()
    first = next(i for i in range(made.value.size) if given[i * size :][:size] != should[i * size :][:size])
    with pytest.raises(
        PromiseBroken, match=f"hop h breaks the promise Fact of x: element {first} is"
    ) as caught:
        wire.verify("h", one, made.value, made.env)
    assert caught.value.at == ("token", first // (made.value[0].size))


@given(hnp.arrays(np.bool_, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
def test_bits_of_any_shape_come_back(value: A) -> None:
    shape = tuple(f"d{i}" for i in range(value.ndim))
    one = column("bool", shape, Bits())
    assert bits(crossed(one, value, {})) == bits(value)
    assert wire.pack("h", one, value, {}).nbytes == -(-value.size // 8)
    wire.verify("h", column("bool", shape, promises=(Bits(),)), value, {})


@given(packed(tails=False))
def test_shared_prefixes_lose_nothing_whatever_the_content(made: Rows) -> None:
    one = column(made.dtype, form=Prefix("bounds"))
    assert bits(crossed(one, made.value, made.env)) == bits(made.value)


@given(packed(["int64"], tails=False), st.integers(1, 4))
def test_a_row_that_begins_as_the_one_before_is_there_once(made: Rows, times: int) -> None:
    value = np.tile(made.value, times)
    env = {"bounds": np.arange(times + 1) * len(made.value)}
    one = column("int64", form=Prefix("bounds"))
    assert len(wire.pack("h", one, value, env)) == PLACE * (times - 1) + 8 * len(made.value)
    assert bits(crossed(one, value, env)) == bits(value)


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=8))
def test_each_node_of_the_tree_that_rows_make_is_there_once_in_whatever_order_they_come(
    rows: list[list[int]],
) -> None:
    nodes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    env = {"bounds": np.cumsum([0, *map(len, rows)])}
    value = np.array([x for row in rows for x in row], np.int64)
    one = column("int64", form=Prefix("bounds"))
    assert len(wire.pack("h", one, value, env)) == PLACE * max(0, len(rows) - 1) + 8 * len(nodes)
    assert bits(crossed(one, value, env)) == bits(value)


@given(st.sampled_from(INTEGERS), st.sampled_from([1, 2, 255, 256, 257, 65536, 2**32]), st.data())
def test_integers_below_a_bound_come_back_and_others_are_found(
    dtype: str, below: int, data: st.DataObject
) -> None:
    info = np.iinfo(dtype)
    near = st.sampled_from(
        [n for n in (0, 1, below - 1, below, -1, info.min, info.max) if info.min <= n <= info.max]
    )
    value = np.array(data.draw(st.lists(near, max_size=6)), dtype)
    one = column(dtype, promises=(Range(below),))
    odd = [i for i, n in enumerate(value.tolist()) if not 0 <= n < below]
    if odd:
        for check in (wire.check_range, lambda *a: wire.verify(*a, {})):
            with pytest.raises(PromiseBroken, match=f"element {odd[0]} is .* the bound is {below}") as caught:
                check("h", one, value)
            assert caught.value.at == ("token", odd[0])
        return
    wire.verify("h", one, value, {})
    stored = next(f"uint{n}" for n in (8, 16, 32, 64) if below <= 2**n)
    for form, env in ((None, {}), (Prefix("bounds"), {"bounds": np.array([0, len(value)])})):
        one = column(dtype, form=form, stored=stored)
        assert bits(crossed(one, value, env)) == bits(value)
        # Who has them in fewer bytes may give them so, and who reads them as they lie gets them so.
        small = value.astype(stored)
        assert bits(crossed(one, small, env)) == bits(value)
        assert bits(crossed(one, value, env, narrow=True)) == bits(small)
    wire.verify("h", column(dtype, promises=(Range(below),)), value.astype(stored), {})


def test_a_zero_with_a_sign_is_told_how_to_lose_it() -> None:
    mask = np.array([True, False])
    one = column("float32", promises=(PerRow("leaf", "bounds", "mask", last=False),))
    env = {"bounds": np.array([0, 2]), "mask": mask}
    with pytest.raises(PromiseBroken, match=r"element 1 is -0\.0, and would have to be 0\.0") as caught:
        wire.verify("h", one, np.array([-1, -1], np.float32) * mask, env)
    assert "write np.where(mask, x, 0) where it is x * mask" in caught.value.help
    wire.verify("h", one, np.where(mask, np.array([-1, -1], np.float32), np.float32(0)), env)
    with pytest.raises(PromiseBroken, match="element 1 is 2") as caught:
        wire.verify("h", one, np.array([1, 2], np.float32), env)
    assert "np.where" not in caught.value.help


@given(
    hnp.arrays(np.int32, st.integers(0, 5)),
    hnp.arrays(np.int32, st.integers(0, 5), elements=st.integers(0, 1)),
)
def test_what_is_derived_is_compared_with_what_a_reader_would_make(source: A, noise: A) -> None:
    one = column("int32", promises=(NEGATED,))
    wire.verify("h", one, -source, {"source": source})
    other = -source[: len(noise)] + noise[: len(source)]
    if bits(other) == bits(-source):
        wire.verify("h", one, other, {"source": source})
        return
    where = "element" if len(other) == len(source) else rf"it is int32\[{len(other)}\]"
    with pytest.raises(PromiseBroken, match=where):
        wire.verify("h", one, other, {"source": source})


def test_a_derivation_of_another_dtype_or_that_raises_is_named() -> None:
    source = np.arange(3, dtype=np.int32)
    one = column("int64", promises=(NEGATED,))
    with pytest.raises(PromiseBroken, match=r"it is int64\[3\], and would have to be int32\[3\]"):
        wire.verify("h", one, np.arange(3) * 2, {"source": source})
    one = column("int64", promises=(Derived("numpy.linalg.inv", ("source",)),))
    with pytest.raises(PromiseBroken, match=r"inv raises LinAlgError: .* for source"):
        wire.verify("h", one, np.arange(3), {"source": source})


@pytest.mark.parametrize("bounds", [[], [0], [0, 2], [1, 3], [0, 2, 1, 3], [0, 4]])
@pytest.mark.parametrize("form", [PER_ROW[0], PER_ROW[1], Prefix("bounds")])
def test_bounds_that_do_not_part_the_value_are_named(bounds: list[int], form: PerRow | Prefix) -> None:
    env = {"bounds": np.array(bounds, np.int64), "mask": np.ones(3, np.bool_)}
    with pytest.raises(PromiseBroken, match=r"x: bounds is \[.*\], and would have to rise from 0 to 3"):
        wire.pack("h", column("float32", form=form), np.zeros(3, np.float32), env)


def test_no_leaf_at_all_is_no_row() -> None:
    env = {"bounds": np.array([0], np.int64), "mask": np.zeros(0, np.bool_)}
    empty = np.zeros(0, np.float32)
    forms: list[Form] = [*PER_ROW, Prefix("bounds"), Bits()]
    for form in forms[:-1]:
        assert bits(crossed(column("float32", form=form), empty, env)) == bits(empty)
    promises: tuple[Promise, ...] = (*PER_ROW, Range(1))
    wire.verify("h", column("float32", promises=promises), empty, env)
