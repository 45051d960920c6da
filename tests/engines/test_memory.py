"""The key/value cache gives its memory back and takes it again: what the system sees, and what may not change."""

from __future__ import annotations

import asyncio
import gc
import math
import mmap
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from flowgraph.engines.caches import Prefix
from flowgraph.engines.memory import PageMemory, advise_if_known
from flowgraph.engines.protocol import Generation, Sampling
from flowgraph.engines.slots import ALIGNMENT, SlotModel
from flowgraph.engines.transformers import TransformersEngine

MB = 1 << 20
SLOTS, CONTEXT = 256, 256  # 32 MiB of cache in float32: little else of the process moves by 2 % of that


class Mapping(NamedTuple):
    """One mapping of this process, in bytes. The kernel joins neighbours of one kind, so it may hold more."""

    start: int
    end: int
    resident: int


def mapping_at(address: int) -> Mapping | None:
    """The mapping in /proc/self/smaps that holds this address."""
    found: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            found = (start, end) if start <= address < end else None
        elif found and first == "Rss:":
            return Mapping(*found, int(rest[0]) * 1024)
    return None


def resident(tensor: torch.Tensor) -> int:
    mapping = mapping_at(tensor.data_ptr())
    assert mapping is not None
    assert mapping.end >= tensor.data_ptr() + tensor.nbytes
    return mapping.resident


def resident_in_process() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def is_zero(tensor: torch.Tensor) -> bool:
    """Without a temporary of its size, unlike `any`, which would show in the process."""
    low, high = tensor.aminmax()
    return bool(low == high == 0)


def near(size: int) -> object:
    return pytest.approx(size, rel=0.02, abs=mmap.PAGESIZE)


def model_of(where: Path, dtype: torch.dtype = torch.float32) -> SlotModel:
    torch.set_num_threads(1)
    return SlotModel(str(where), slots=SLOTS, context=CONTEXT, dtype=dtype)


def bits_of_steps(model: SlotModel) -> list[str]:
    """Digests of the logits of three steps, after a prompt in every slot."""
    fill_all(model, model.prefill([1, 2, 3, 4, 5]))
    steps = (model.decode([7 * step + 1] * SLOTS, [5 + step] * SLOTS)[0] for step in range(3))
    return [sha256(logits_SV.view(torch.uint8).numpy()).hexdigest() for logits_SV in steps]


def fill_all(model: SlotModel, prefix: Prefix) -> None:
    for slot in range(SLOTS):
        model.fill(slot, prefix)


# The mapping


def test_pages_go_and_come_back_as_zeros_at_the_same_address() -> None:
    size = 64 * MB + 12  # not whole pages
    memory = PageMemory(size)
    x = memory.tensor((size // 4,), torch.float32)
    view = x[1000:].view(-1)
    addresses = x.data_ptr(), view.data_ptr()
    gc.collect()  # not between two looks at the process
    assert x.data_ptr() % mmap.PAGESIZE == 0
    assert memory.size == 64 * MB + mmap.PAGESIZE
    assert is_zero(x)
    for value in (1.0, math.nan):
        x.fill_(value)
        in_mapping, in_process = resident(x), resident_in_process()
        assert memory.release() == memory.size
        assert memory.released
        assert in_mapping - resident(x) == memory.size
        released = resident_in_process()
        assert in_process - released == near(memory.size)
        memory.resume()
        assert not memory.released
        assert is_zero(x)
        assert is_zero(view)
        x.fill_(1)
        assert resident(x) == in_mapping
        assert resident_in_process() - released == near(memory.size)
        assert (x.data_ptr(), view.data_ptr()) == addresses


def test_both_are_idempotent_and_only_a_release_loses_the_contents() -> None:
    memory = PageMemory(3 * mmap.PAGESIZE)
    x = memory.tensor((10,), torch.int32).fill_(5)
    memory.resume()
    assert x.tolist() == [5] * 10
    assert memory.release() == 3 * mmap.PAGESIZE
    assert memory.release() == 0
    memory.resume()
    memory.resume()
    assert x.tolist() == [0] * 10


def test_a_tensor_keeps_the_mapping_alive_and_the_last_one_ends_it() -> None:
    x = PageMemory(64 * MB).tensor((4, 4 * MB), torch.float32)
    gc.collect()
    view = x.fill_(1)[1]
    del x
    gc.collect()
    assert view.sum() == 4 * MB
    before = resident_in_process()
    del view
    gc.collect()
    assert before - resident_in_process() == near(64 * MB)


def test_a_tensor_larger_than_the_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer"):
        PageMemory(8).tensor((mmap.PAGESIZE,), torch.float32)


@pytest.mark.parametrize("size", [0, -1])
def test_a_mapping_of_nothing_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        PageMemory(size)


def test_advice_that_the_kernel_does_not_know_is_passed_over() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        assert advise_if_known(mapping, mmap.MADV_WILLNEED)
        assert not advise_if_known(mapping, 9999)


# The model's cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_is_released_and_resumed(tiny: Path, dtype: torch.dtype) -> None:
    model = model_of(tiny, dtype)
    cache = model._cache
    all_N = cache.all_N
    tensors = [all_N, *(x for layers in cache._layers for x in layers)]
    addresses = [x.data_ptr() for x in tensors]
    before = bits_of_steps(model)
    prefix = model.prefill([9, 8, 7])
    gc.collect()  # not between two looks at the process
    in_mapping, in_process = resident(all_N), resident_in_process()

    assert model.release_cache() == all_N.nbytes  # whole pages, here
    released = resident_in_process()
    assert in_mapping - resident(all_N) == all_N.nbytes
    assert in_process - released == near(all_N.nbytes)
    assert model.release_cache() == 0

    model.resume_cache()
    assert is_zero(all_N)
    fill_all(model, prefix)
    assert resident(all_N) == in_mapping
    assert resident_in_process() - released == near(all_N.nbytes)
    model.resume_cache()
    assert not is_zero(all_N)
    assert bits_of_steps(model) == before
    assert [x.data_ptr() for x in tensors] == addresses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [5, 37])
def test_every_head_of_every_slot_begins_on_a_vector_boundary(
    tiny: Path, context: int, dtype: torch.dtype
) -> None:
    model = SlotModel(str(tiny), slots=3, context=context, dtype=dtype)
    parts_LSHTD = model._cache.parts_LSHTD
    assert all(part.is_contiguous() for part in parts_LSHTD)
    assert {block.data_ptr() % ALIGNMENT for part in parts_LSHTD for block in part.flatten(0, 2)} == {0}


def test_a_released_cache_is_neither_filled_nor_decoded(tiny: Path) -> None:
    model = model_of(tiny)
    prefix = model.prefill([1, 2])
    model.release_cache()
    in_mapping = resident(model._cache.all_N)
    with pytest.raises(RuntimeError, match=r"released: call resume_cache\(\) first"):
        model.fill(0, prefix)
    with pytest.raises(RuntimeError, match=r"released: call resume_cache\(\) first"):
        model.decode([1] * SLOTS, [2] * SLOTS)
    assert resident(model._cache.all_N) == in_mapping
    assert torch.equal(model.prefill([1, 2]).logits_V, prefix.logits_V)  # a prompt by itself needs no slot


def test_a_request_gets_the_same_bits_after_a_release(tiny: Path) -> None:
    engine = TransformersEngine(str(tiny), slots=4, context=40, dtype="float32", threads=1)
    model = engine._open()

    def ask() -> Generation:
        prompt, sampling = np.array([3, 1, 4, 1, 5], np.int32), Sampling(max_new_tokens=20, temperature=1.0)
        return asyncio.run(engine.generate(prompt, sampling, key=9, rid="r"))

    before = ask()
    model._cache.all_N.fill_(torch.nan)
    model.release_cache()
    with pytest.raises(RuntimeError, match="is released"):
        ask()
    model.resume_cache()
    after = ask()
    assert after.ids.tolist() == before.ids.tolist()
    assert after.logprobs.tobytes() == before.logprobs.tobytes()
