"""Bytes into an arena: cut among threads without a gap, and left alone where they lie already."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.runtime.copying import LINE, PART, Copy, address, copy, is_at, shared

PAGE = mmap.PAGESIZE


@given(
    st.lists(st.tuples(st.integers(0, 3 * PAGE), st.integers(0, 2 * LINE)), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_shares_hold_every_byte_once_and_about_as_many_each(
    sizes: list[tuple[int, int]], shares: int
) -> None:
    """sizes: of each array, and the bytes from the last one's end to its start; so they end before and after pages."""
    memory = np.zeros(sum(map(sum, sizes)) + LINE, np.uint8)
    copies, at = [], 0
    for size, gap in sizes:
        at += gap
        copies.append(Copy(memory[at : at + size], np.arange(size).astype(np.uint8) + np.uint8(len(copies))))
        at += size
    parts = shared(copies, shares)
    total = sum(one.source.nbytes for one in copies)
    assert len(parts) == shares
    for part in parts:
        bytes_of_part = sum(one.source.nbytes for one in part)
        assert abs(bytes_of_part - total / shares) <= 2 * LINE
        for target, source in part:
            assert len(target) == len(source) > 0
            target += source
    for target, source in copies:
        assert np.array_equal(target, source)  # each byte was added once
    assert memory.sum() == sum(int(source.sum()) for _, source in copies)  # and none outside


@given(st.lists(st.integers(1, 3 * PAGE), min_size=2, max_size=5), st.integers(2, 4))
def test_threads_share_no_cache_line_within_an_array(sizes: list[int], shares: int) -> None:
    copies = [Copy(np.zeros(n, np.uint8), np.ones(n, np.uint8)) for n in sizes]
    starts = {address(one.target) for one in copies}
    for part in shared(copies, shares):
        for one in part:
            assert address(one.target) % LINE == 0 or address(one.target) in starts


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_threads_copy_is_what_was_there(threads: int) -> None:
    """Large enough for three; one array of odd bytes, one that is not contiguous, one of nothing, and one number."""
    rng = np.random.default_rng(threads)
    large = rng.integers(0, 255, 2 * PART + 4097, np.uint8)
    sources = [
        large,
        rng.random((700, 900)).T,
        np.zeros((0, 3), np.int64),
        np.array(7.0),
        rng.random(PART // 8 + 1),
    ]
    memory = np.full(sum(s.nbytes for s in sources) + PAGE, 255, np.uint8)
    targets, at = [], 8
    for source in sources:
        targets.append(np.frombuffer(memory, source.dtype, source.size, at).reshape(source.shape))
        at = -(-(at + source.nbytes) // 8) * 8
    copy([Copy(t, s) for t, s in zip(targets, sources, strict=True)], threads)
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(target, source)
    assert (memory[:8] == 255).all()
    assert (memory[at:] == 255).all()


def test_what_lies_there_already_is_not_written() -> None:
    """The pages are mapped to be read: a write would raise."""
    memory = mmap.mmap(-1, PAGE)
    array = np.frombuffer(memory, np.int64)
    to_read = np.frombuffer(memoryview(memory).toreadonly(), np.int64)
    assert is_at(array, to_read)
    copy([Copy(to_read, array)])
    with pytest.raises(ValueError, match="read-only"):
        copy([Copy(to_read, array.copy())])
    assert not is_at(array[::2], to_read[: len(array) // 2])
    assert not is_at(array[:4], to_read)
