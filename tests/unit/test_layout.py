"""Columns of a block lie apart, aligned and inside the block, whatever the sizes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.plan.compile import compile_file
from flowgraph.plan.layout import aligned, spans, tensor_bytes
from flowgraph.plan.plan import Column, Hop, TensorSlot
from flowgraph.spec.types import dtype_of

PLAN = compile_file(str(Path(__file__).parents[1] / "runtime/toy.yaml"))
DTYPES = st.sampled_from(["bool", "int32", "float64", "bfloat16", "float8_e4m3fn", "uint8"])
BOUNDS = {"a": 7, "b": 5}


def array(name: str, dtype: str, shape: tuple[str, ...]) -> Column:
    most = dtype_of(dtype).itemsize
    for dim in shape:
        most *= BOUNDS[dim]
    return Column(name, "array", dtype, shape, "", (), float(most), most, True, True, None, dtype, shape)


def opaque(name: str, kind: str, most: int) -> Column:
    return Column(name, kind, "", (), "", (), float(most), most, True, True)


SHAPES = st.lists(st.sampled_from(sorted(BOUNDS)), max_size=3).map(tuple)
ARRAYS = st.builds(array, st.just("x"), DTYPES, SHAPES)
COLUMNS = st.lists(
    ARRAYS
    | st.builds(opaque, st.just("x"), st.sampled_from(["text", "json", "tensors"]), st.integers(0, 200)),
    max_size=6,
)


@given(COLUMNS, st.data())
def test_spans_never_overlap_and_fit_the_bound(columns: list[Column], data: st.DataObject) -> None:
    named = tuple(msgspec.structs.replace(c, name=f"c{i}") for i, c in enumerate(columns))
    hop: Hop = msgspec.structs.replace(PLAN.hops["rollout"], columns=named)
    sizes = {d: data.draw(st.integers(0, most)) for d, most in BOUNDS.items()}
    # a set of tensors has one size; text and JSON any up to their bound
    sizes |= {
        f"#{c.name}": c.max_bytes if c.kind == "tensors" else data.draw(st.integers(0, c.max_bytes))
        for c in named
        if c.kind != "array"
    }
    laid = list(spans(hop, sizes).values())
    assert all(one.start + one.nbytes <= other.start for one, other in pairwise(laid))
    for column, span in zip(named, laid, strict=True):
        assert span.start % (64 if column.kind == "tensors" else 8) == 0
        assert 0 <= span.nbytes <= column.max_bytes
        assert column.kind != "array" or span.shape == tuple(sizes[d] for d in column.shape)
    sets = sum(c.kind == "tensors" for c in named)
    assert (
        max((s.start + s.nbytes for s in laid), default=0)
        <= sum(aligned(c.max_bytes) for c in named) + 64 * sets
    )


@given(st.sampled_from(sorted(PLAN.hops)), st.data())
def test_a_block_of_the_plan_holds_every_row_within_its_bounds(name: str, data: st.DataObject) -> None:
    hop = PLAN.hops[name]
    sizes = {d: data.draw(st.integers(0, most)) for d, most in zip(hop.dims, hop.bounds, strict=True)}
    assert all(s.start + s.nbytes <= hop.block_bytes for s in spans(hop, sizes).values())


@given(st.integers(0, 10**6), st.sampled_from([8, 64, 4096]))
def test_aligned_is_the_next_multiple(n: int, to: int) -> None:
    assert aligned(n, to) % to == 0
    assert 0 <= aligned(n, to) - n < to


def test_a_tensor_is_padded_to_a_cache_line() -> None:
    assert tensor_bytes(TensorSlot("w", (3, 5), "bfloat16")) == 64
    assert tensor_bytes(TensorSlot("w", (64,), "bfloat16")) == 128
    assert tensor_bytes(TensorSlot("w", (), "float32")) == 64
