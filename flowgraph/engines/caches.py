"""Keys and values in the `transformers` engine: of one prompt, of the prompts that requests share, and of all slots.

What a model keeps of a token is in parts: keys, values and, where it has an indexer, that one's keys. Each has its own
heads and width.

Shapes: L layers, S slots, H heads, T columns (the context), D width, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from flowgraph.engines.memory import PageMemory
from flowgraph.engines.routing import Rows


class Prefix(NamedTuple):
    """What a prefilled prompt leaves: its keys and values, the logits after its last token, and what was asked for of
    what was chosen for its tokens: side channel → [P, L, choices of a token].
    """

    parts_LHPD: tuple[Tensor, ...]
    logits_V: Tensor
    chosen: Mapping[str, Rows] = {}


class PrefixCache:
    """The most recently used prefixes, by (version, prompt ids); at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._prefixes: OrderedDict[tuple[int, bytes], Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def get(self, version: int, prompt: bytes) -> Prefix | None:
        prefix = self._prefixes.get((version, prompt))
        if prefix is not None:
            self._prefixes.move_to_end((version, prompt))
        return prefix

    def put(self, version: int, prompt: bytes, prefix: Prefix) -> None:
        self._prefixes[version, prompt] = prefix
        if len(self._prefixes) > self._capacity:
            self._prefixes.popitem(last=False)

    def clear(self) -> None:
        self._prefixes.clear()


class PromptCache(Cache):  # type: ignore[misc]
    """Collects what is kept of one prompt, layer by layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._kept: tuple[list[Tensor], ...] = ([], [], [])

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """[L, H, P, D] of each part."""
        return tuple(torch.stack(part) for part in self._kept if part)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self._kept[0])
        self._kept[0].append(key[0])
        self._kept[1].append(value[0])
        return key, value

    def update_indexer(self, keys: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        """keys: [1, P, D], of one head."""
        assert layer_idx == len(self._kept[2])
        self._kept[2].append(keys)
        return keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class SlotCache(Cache):  # type: ignore[misc]
    """The keys and values of all slots; a step writes one column per slot, each at a position of its own.

    shapes: (H, D) of each part; all_N: all of its memory; parts_LSHTD: views of that
    """

    def __init__(
        self, layers: int, slots: int, shapes: Sequence[tuple[int, int]], columns: int, dtype: torch.dtype
    ) -> None:
        super().__init__(layers=[])
        counts = [layers * slots * heads * columns * width for heads, width in shapes]
        self.memory = PageMemory(sum(counts) * dtype.itemsize)
        self.all_N = self.memory.tensor((sum(counts),), dtype)
        flat = zip(torch.split(self.all_N, counts), shapes, strict=True)
        self.parts_LSHTD = [part.view(layers, slots, heads, columns, width) for part, (heads, width) in flat]
        self._layers = [part.unbind() for part in self.parts_LSHTD]  # by part, then by layer
        self._columns = columns
        self._rows_S = torch.arange(slots)
        self.positions_S = torch.zeros(slots, dtype=torch.int64)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._put(0, key, layer_idx), self._put(1, value, layer_idx)

    def update_indexer(self, keys: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        """keys: [S, 1, D], of one head; returns [S, T, D]."""
        return self._put(2, keys[:, None], layer_idx)[:, 0]

    def _put(self, part: int, new_SH1D: Tensor, layer: int) -> Tensor:
        held_SHTD: Tensor = self._layers[part][layer]
        held_SHTD[self._rows_S, :, self.positions_S] = new_SH1D[:, :, 0]
        return held_SHTD

    def fill(self, slot: int, parts_LHPD: Sequence[Tensor]) -> None:
        """Start a slot from a prefix, zeroed beyond it: 0 times a stale NaN in a masked column is NaN."""
        for held_LSHTD, part_LHPD in zip(self.parts_LSHTD, parts_LHPD, strict=True):
            tokens = part_LHPD.shape[2]
            held_LSHTD[:, slot, :, :tokens] = part_LHPD
            held_LSHTD[:, slot, :, tokens:] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # unused: masks and positions are given

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._columns, 0
