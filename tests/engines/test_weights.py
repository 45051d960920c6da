"""Weights on their way to a server: the stage that it loads as a file, and deltas of the bits that a step changed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowgraph.engines.weights.checksum import BLOCK, bits, checksum
from flowgraph.engines.weights.delta import Delta, DeltaMismatch, apply, encode, pack, unpack
from flowgraph.engines.weights.layout import DTYPES, Entry, entries, header, views
from flowgraph.engines.weights.stage import FILE, Stage
from flowgraph.errors import MemoryShort

runs = settings(deadline=None)  # one slow moment of a busy machine is no failure
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TABLE = [
    Entry("embed", torch.bfloat16, (5, 3)),
    Entry("norm", torch.float32, (7,)),
    Entry("scale", torch.float16, ()),
    Entry("unused", torch.bfloat16, (0, 4)),
]
# Zeros of both signs, ones, infinities, quiet and signalling NaNs, NaNs with a payload, the smallest subnormals.
SPECIAL = {
    2: (0x0000, 0x8000, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x3C00, 0x7C01),
    4: (0x0, 0x80000000, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x1),
}


def random_tensor(entry: Entry, random: np.random.Generator, special: float = 0.2) -> Tensor:
    """Any bits at all, a share of them special."""
    count, width = entry.nbytes // entry.dtype.itemsize, entry.dtype.itemsize
    raw = random.integers(0, 256, (count, width), dtype=np.uint8)
    if width in SPECIAL:
        chosen = random.choice(np.array(SPECIAL[width], f"<u{width}"), count)
        raw = np.where(random.random((count, 1)) < special, chosen.view(np.uint8).reshape(count, width), raw)
    if entry.dtype is torch.bool:
        raw %= 2
    flat = torch.from_numpy(raw.reshape(-1)) if count else torch.empty(0, dtype=torch.uint8)
    return flat.view(entry.dtype).reshape(entry.shape)


def random_set(table: list[Entry], seed: int = 0) -> dict[str, Tensor]:
    random = np.random.default_rng(seed)
    return {entry.name: random_tensor(entry, random) for entry in table}


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return entries(one) == entries(other) and all((bits(one[n]) == bits(other[n])).all() for n in one)


def tables(dtypes: tuple[torch.dtype, ...] = FLOATS, least: int = 0) -> st.SearchStrategy[list[Entry]]:
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    names = st.text("abc./é", min_size=1, max_size=6)
    entry = st.builds(Entry, names, st.sampled_from(dtypes), shapes)
    return st.lists(entry, min_size=least, max_size=5, unique_by=lambda entry: entry.name)


# the layout


@runs
@given(
    tables(tuple(DTYPES.values())), st.dictionaries(st.text("xyz", min_size=1), st.text()), st.integers(0, 99)
)
def test_a_buffer_is_what_safetensors_reads(table: list[Entry], metadata: dict[str, str], seed: int) -> None:
    start, size = header(table, metadata)
    buffer = bytearray(size)
    buffer[: len(start)] = start
    tensors, found = views(buffer)
    wanted = random_set(table, seed)
    for name, tensor in tensors.items():
        tensor.copy_(wanted[name])
    assert found == metadata
    assert len(start) % 8 == 0
    read = safetensors.torch.load(bytes(buffer))
    assert same_bits({n: read[n] for n in wanted}, wanted)
    assert same_bits({n: views(bytes(buffer))[0][n] for n in wanted}, wanted)
    assert all(tensor.data_ptr() % tensor.dtype.itemsize == 0 for tensor in tensors.values())


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([TABLE[0], TABLE[0]], "tensor embed: the name is there twice"),
        ([Entry("__metadata__", torch.float32, ())], "tensor __metadata__: the name is .* the format's own"),
        ([Entry("c", torch.complex128, ())], "tensor c: torch.complex128 has no place"),
    ],
)
def test_a_table_that_no_file_can_have_is_refused(table: list[Entry], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        header(table)


@pytest.mark.parametrize(
    "buffer", [b"", b"short", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"a text of more than eight"]
)
def test_what_is_no_such_file_is_refused(buffer: bytes) -> None:
    with pytest.raises(ValueError, match=f"a buffer of {len(buffer)} bytes is no safetensors file"):
        views(buffer)


# the stage

READER = """
import sys
from safetensors.torch import load_file
for path in sys.stdin:
    tensors = load_file(path.strip())
    print({name: tensors[name].float().flatten().tolist() for name in sorted(tensors)}, flush=True)
"""


def test_another_process_loads_what_was_written_last(tmp_path: Path) -> None:
    stage = Stage(TABLE, tmp_path)
    assert os.listdir(stage.directory) == [FILE]
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for version in (3, 4):
            tensors = {e.name: torch.full(e.shape, version + 0.5, dtype=e.dtype) for e in TABLE}
            stage.write(tensors, version)
            assert stage.version == version
            print(Path(stage.directory, FILE), file=reader.stdin, flush=True)
            wanted = {name: tensors[name].float().flatten().tolist() for name in sorted(tensors)}
            assert reader.stdout.readline().strip() == str(wanted)
        reader.stdin.close()
    stage.close()


def test_views_are_the_memory_itself(tmp_path: Path) -> None:
    stage = Stage(TABLE, tmp_path)
    assert stage.version is None
    stage.tensors["norm"][2] = 4.0
    assert safetensors.torch.load_file(Path(stage.directory, FILE))["norm"].tolist() == [0, 0, 4, 0, 0, 0, 0]
    stage.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm": None}, "tensor norm is missing"),
        ({"lm_head": torch.zeros(2)}, "tensor lm_head is unknown"),
        (
            {"embed": torch.zeros(3, 5, dtype=torch.bfloat16)},
            r"embed is torch.bfloat16\[3, 5\], not .*\[5, 3\]",
        ),
        ({"scale": torch.tensor(1.0)}, r"scale is torch.float32\[\], not torch.float16\[\]"),
        ({"norm": None, "aaa": torch.zeros(1)}, "tensor aaa is unknown"),  # the first by name
    ],
)
def test_another_set_is_refused_and_nothing_changes(
    tmp_path: Path, change: dict[str, Tensor | None], said: str
) -> None:
    stage = Stage(TABLE, tmp_path)
    stage.write(random_set(TABLE, 1), 1)
    before = clones(stage.tensors)
    odd = {name: tensor for name, tensor in (random_set(TABLE, 2) | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=said):
        stage.write(odd, 2)
    assert stage.version == 1
    assert same_bits(stage.tensors, before)
    stage.close()


def test_a_write_that_fails_half_way_leaves_no_version(tmp_path: Path) -> None:
    stage = Stage(TABLE, tmp_path)
    stage.write(random_set(TABLE, 1), 1)
    broken = random_set(TABLE, 2) | {"norm": torch.empty(7, device="meta")}
    with pytest.raises(NotImplementedError):
        stage.write(broken, 2)
    assert stage.version is None
    stage.write(random_set(TABLE, 2), 2)
    assert same_bits({e.name: stage.tensors[e.name] for e in TABLE}, random_set(TABLE, 2))
    stage.close()


def is_held(inode: int) -> bool:
    """Whether this process has that memory open or mapped. Others' stages may live beside it."""
    opened = [fd.stat().st_ino for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    mapped = [int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()]
    return inode in (*opened, *mapped)


def test_close_leaves_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    stage = Stage(TABLE, tmp_path)
    stage.write({e.name: torch.ones(e.shape, dtype=e.dtype) for e in TABLE}, 1)
    kept = stage.tensors["norm"]
    inode = Path(stage.directory, "model.safetensors").stat().st_ino
    stage.close()
    stage.close()
    assert list(tmp_path.iterdir()) == []
    assert stage.version is None
    assert kept.sum() == 7  # a view outlives the stage, and is the last to hold its memory
    assert is_held(inode)
    del kept
    assert not is_held(inode)
    with pytest.raises(RuntimeError, match="closed"):
        stage.write(random_set(TABLE), 2)


HOLDER = """
import sys, time
import torch
from flowgraph.engines.weights.layout import Entry
from flowgraph.engines.weights.stage import Stage
print(Stage([Entry("w", torch.float32, (8,))], sys.argv[1]).directory, flush=True)
time.sleep(60)
"""


def test_a_killed_holder_leaves_no_memory_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout is not None
        path = Path(it.stdout.readline().strip(), FILE)
        assert path.stat().st_nlink == 0  # nothing but descriptors leads to it
        assert safetensors.torch.load_file(path)["w"].tolist() == [0.0] * 8
        it.send_signal(signal.SIGKILL)
    assert path.is_symlink()
    assert not path.exists()


def test_a_machine_that_cannot_hold_it_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowgraph.engines.weights.stage.available", lambda: 3_000_000)
    with pytest.raises(MemoryShort, match="takes 40 MB, and 3 MB of memory are available"):
        Stage([Entry("w", torch.float32, (10_000_000,))], tmp_path)
    assert list(tmp_path.iterdir()) == []


# deltas


def stepped(old: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """About this share of elements replaced by others (some of them by the same bits)."""
    random = np.random.default_rng(seed)
    new = {}
    for name, tensor in old.items():
        other = random_tensor(Entry(name, tensor.dtype, tuple(tensor.shape)), random)
        chosen = torch.from_numpy(random.random(tensor.numel()) < share).reshape(tensor.shape)
        new[name] = torch.where(chosen, other, tensor)
    return new


@runs
@given(tables(), st.floats(0, 1), st.integers(0, 2**31))
def test_a_delta_carries_every_bit(table: list[Entry], share: float, seed: int) -> None:
    old = random_set(table, seed)
    new = stepped(old, share, seed)
    delta = encode(old, new, base=4, version=9)
    count = sum(int((bits(old[n]) != bits(new[n])).sum()) for n in old)
    total = sum(tensor.numel() for tensor in old.values())
    assert delta.changed == (count / total if total else 0.0)
    held = clones(old)
    apply(delta, held, at=4)
    assert same_bits(held, new)
    shipped = unpack(pack(delta))
    assert (shipped.nbytes, shipped.changed, shipped.checksum) == (
        delta.nbytes,
        delta.changed,
        delta.checksum,
    )
    again = clones(old)
    apply(unpack(bytes(pack(shipped))), again, at=4)
    assert same_bits(again, new)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("changed", [0, 1, 31, 32, 33, 500, 1000])
def test_positions_take_the_cheaper_form(dtype: torch.dtype, changed: int) -> None:
    """1000 elements: 125 bytes of bits against 4 bytes a position, so positions up to 31 of them."""
    old = {"w": torch.zeros(1000, dtype=dtype), "same": torch.ones(10, dtype=dtype)}
    new = clones(old)
    new["w"][torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:changed]] = 1
    delta = encode(old, new, base=0, version=1)
    assert delta.nbytes == min(4 * changed, 125 if changed else 0) + changed * dtype.itemsize
    assert list(delta.changes) == (["w"] if changed else [])
    apply(delta, old, at=0)
    assert same_bits(old, new)


def test_bits_decide_and_values_do_not() -> None:
    nan = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    old = {"zero": torch.tensor([0.0, 1.0]), "nan": nan.clone(), "same": nan.clone()}
    new = {"zero": torch.tensor([-0.0, 1.0]), "nan": nan.flip(0), "same": nan.clone()}
    delta = encode(old, new, base=0, version=1)
    assert {name: change.values.numel() for name, change in delta.changes.items()} == {"zero": 1, "nan": 2}
    apply(delta, old, at=0)
    assert same_bits(old, new)


def test_more_than_one_piece_goes_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowgraph.engines.weights.delta.PIECE", 7)
    for share in (0.02, 0.5, 1.0):
        old = random_set([Entry("w", torch.bfloat16, (13, 77))])
        new = stepped(old, share, seed=1)
        apply(encode(old, new, base=0, version=1), old, at=0)
        assert same_bits(old, new)


def test_sets_that_differ_in_more_than_values_have_no_delta() -> None:
    old = random_set(TABLE)
    with pytest.raises(ValueError, match=r"tensor norm is torch.float32\[6\], not torch.float32\[7\]"):
        encode(old, old | {"norm": torch.zeros(6)}, base=0, version=1)
    with pytest.raises(ValueError, match="tensor embed is missing"):
        encode(old, {name: old[name] for name in ("norm", "scale", "unused")}, base=0, version=1)


def step_of(table: list[Entry], share: float = 0.5) -> tuple[dict[str, Tensor], dict[str, Tensor], Delta]:
    old = random_set(table)
    new = stepped(old, share, seed=1)
    return old, new, encode(old, new, base=4, version=5)


def test_another_base_version_is_refused_and_nothing_changes() -> None:
    old, _, delta = step_of(TABLE)
    held = clones(old)
    for at in (3, 5):
        with pytest.raises(DeltaMismatch, match=f"from version 4, and the weights are of version {at}"):
            apply(delta, held, at=at)
    assert same_bits(held, old)


@runs
@given(st.integers(0, 2**31), st.floats(0, 0.9))
def test_the_wrong_weights_of_the_right_version_are_caught(seed: int, share: float) -> None:
    old, new, delta = step_of([Entry("w", torch.bfloat16, (40, 5)), Entry("b", torch.float32, (9,))], share)
    random = np.random.default_rng(seed)
    held = clones(old)
    kept = [
        (n, i) for n in old for i in np.flatnonzero(bits(old[n]) == bits(new[n]))
    ]  # the delta leaves these
    name, at = kept[random.integers(len(kept))]
    bits(held[name])[at] ^= 1 << int(random.integers(8))
    with pytest.raises(DeltaMismatch, match="became version 5 are not those that were encoded"):
        apply(delta, held, at=4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"embed": None}, "tensor embed of the delta is not among the weights"),
        ({"embed": torch.zeros(5, 3)}, "tensor embed is torch.float32, and the delta has torch.bfloat16"),
        ({"embed": torch.zeros(2, 3, dtype=torch.bfloat16)}, "tensor embed has 6 elements"),
        ({"embed": torch.zeros(3, 5, dtype=torch.bfloat16).T}, "tensor embed must be contiguous"),
    ],
)
def test_weights_of_another_kind_are_refused_before_anything_is_written(
    change: dict[str, Tensor | None], said: str
) -> None:
    old, _, delta = step_of(TABLE)
    held = {n: t for n, t in (clones(old) | change).items() if t is not None}
    before = clones(held)
    with pytest.raises(ValueError, match=said):
        apply(delta, held, at=4)
    assert same_bits(held, before)


@pytest.mark.parametrize("share", [0.01, 0.6])
def test_damaged_positions_are_refused_before_anything_is_written(share: float) -> None:
    table = [Entry("w", torch.bfloat16, (400,))]
    old, _, delta = step_of(table, share)
    delta.changes["w"].at[-1] ^= np.array(
        1 << delta.changes["w"].at.itemsize * 8 - 1, delta.changes["w"].at.dtype
    )
    held = clones(old)
    with pytest.raises(
        DeltaMismatch, match="tensor w has 400 elements, which the delta's positions don't fit"
    ):
        apply(delta, held, at=4)
    assert same_bits(held, old)


@pytest.mark.parametrize("lost", ["base", "checksum", "elements"])
def test_a_buffer_without_a_part_of_the_delta_is_refused(lost: str) -> None:
    buffer = pack(step_of(TABLE)[2])
    at = buffer.index(lost.encode())
    buffer[at : at + 1] = b"X"
    with pytest.raises(ValueError, match=f"a buffer without '{lost}' holds no delta"):
        unpack(buffer)


# the checksum


@runs
@given(tables(tuple(DTYPES.values()), least=1), st.integers(0, 2**31))
def test_a_checksum_knows_every_element(table: list[Entry], seed: int) -> None:
    tensors = random_set(table, seed)
    before = checksum(tensors)
    assert checksum(dict(reversed(clones(tensors).items()))) == before
    random = np.random.default_rng(seed)
    for name, tensor in tensors.items():
        for at in range(tensor.numel()):
            flipped = clones(tensors)
            bits(flipped[name])[at] ^= 1 if tensor.dtype is torch.bool else 1 << int(random.integers(7))
            assert checksum(flipped) != before


@runs
@given(st.sampled_from(FLOATS), st.integers(0, 2**31), st.data())
def test_a_checksum_knows_places(dtype: torch.dtype, seed: int, data: Any) -> None:
    size = 2 * BLOCK * 8 // dtype.itemsize + 3  # two blocks and a bit
    tensor = random_tensor(Entry("w", dtype, (size,)), np.random.default_rng(seed), special=0.9)
    i, j = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    swapped = tensor.clone()
    bits(swapped)[[i, j]] = bits(tensor)[[j, i]]
    same = bits(tensor)[i] == bits(tensor)[j]
    assert (checksum({"w": swapped}) == checksum({"w": tensor})) == same


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_lone_minus_zero_has_another_checksum_wherever_it_stands(dtype: torch.dtype) -> None:
    """The hardest pair for sums: words that differ in their highest bit alone."""
    size = 1500
    found = set()
    for at in range(size):
        tensor = torch.zeros(size, dtype=dtype)
        tensor[at] = -0.0
        found.add(checksum({"w": tensor}))
    assert len(found) == size


def test_a_checksum_knows_names_shapes_and_dtypes() -> None:
    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    sets: list[dict[str, Tensor]] = [
        {"a": a, "b": b},
        {"a": b, "b": a},
        {"a": a, "c": b},
        {"a": a.view(2, 3), "b": b},
        {"a": a.view(torch.int32), "b": b},
        {"a": a, "b": b, "c": torch.empty(0)},
        {"a": torch.cat([a, b]), "b": torch.empty(0)},
        {},
    ]
    assert len({checksum(tensors) for tensors in sets}) == len(sets)


def test_a_checksum_is_what_its_module_says() -> None:
    """In Python's integers, so that every machine and every numpy has the same."""
    cut = (1 << 64) - 1

    def fold(x: int, by: int = 32) -> int:
        return x ^ (x >> by)

    def key(i: int) -> int:
        x = (i + 1) * 0x9E3779B97F4A7C15 & cut
        x = fold(x, 30) * 0xBF58476D1CE4E5B9 & cut
        x = fold(x, 27) * 0x94D049BB133111EB & cut
        return fold(x, 31) | 1

    raw = np.random.default_rng(0).integers(0, 256, BLOCK * 8 + 21, dtype=np.uint8)
    words = [int.from_bytes(raw[i : i + 8].tobytes(), "little") for i in range(0, len(raw), 8)]
    # the last two whole words are a block, and the five bytes that are left are one more
    blocks = words[:BLOCK], words[BLOCK:-1], words[-1:]
    sums = [sum(fold(fold(w) * key(i) & cut) for i, w in enumerate(block)) & cut for block in blocks]
    text = b"('w', 'torch.uint8', (131093,))" + b"".join(one.to_bytes(8, "little") for one in sums)
    wanted = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    assert checksum({"w": torch.from_numpy(raw)}) == wanted
