"""Keys and values in the `transformers` engine: of one prompt, of the prompts that requests share, and of all slots.

Shapes: L layers, S slots, H key/value heads, T columns (the context), D head width, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from flowgraph.engines.memory import PageMemory
from flowgraph.engines.routing import Rows


class Prefix(NamedTuple):
    """What a prefilled prompt leaves: its keys and values, the logits after its last token, and if it was asked for
    the experts of its tokens: [P, L, experts of a token].
    """

    kv_L2HPD: Tensor
    logits_V: Tensor
    routed: Rows | None = None


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
    """Collects the keys and values of one prompt, layer by layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kv: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self.kv)
        self.kv.append(torch.cat((key, value)))
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class SlotCache(Cache):  # type: ignore[misc]
    """The keys and values of all slots; a step writes one column per slot, each at a position of its own."""

    def __init__(self, layers: int, slots: int, heads: int, columns: int, width: int, dtype: torch.dtype):
        super().__init__(layers=[])
        shape = (layers, 2, slots, heads, columns, width)
        self.memory = PageMemory(math.prod(shape) * dtype.itemsize)
        self.kv_L2SHTD = self.memory.tensor(shape, dtype)
        self._layers = [(kv_2SHTD[0], kv_2SHTD[1]) for kv_2SHTD in self.kv_L2SHTD]
        # Vectors of a layer by number: those of a slot's first columns, keys and values of each head.
        starts_2SH = torch.arange(0, 2 * slots * heads * columns, columns).view(2, slots, heads)
        self._starts_S2H = starts_2SH.transpose(0, 1)

    def at(self, positions_R: Tensor) -> None:
        """Where the next step writes: the column of each of the first R slots."""
        self._vectors_I = (self._starts_S2H[: len(positions_R)] + positions_R[:, None, None]).reshape(-1)

    def write(self, layer: int, kv_R2HD: Tensor) -> None:
        vectors_ID = self.kv_L2SHTD[layer].view(-1, kv_R2HD.shape[3])
        vectors_ID.index_copy_(0, self._vectors_I, kv_R2HD.reshape(-1, kv_R2HD.shape[3]))

    def read(self, layer: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first R slots in the first C columns: [R, H, C, D] each."""
        keys_SHTD, values_SHTD = self._layers[layer]
        return keys_SHTD[:rows, :, :columns], values_SHTD[:rows, :, :columns]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.write(layer_idx, torch.stack((key[:, :, 0], value[:, :, 0]), dim=1))
        return self._layers[layer_idx]

    def fill(self, slot: int, kv_L2HPD: Tensor) -> None:
        """Start a slot from a prefix, zeroed beyond it: 0 times a stale NaN in a masked column is NaN."""
        tokens = kv_L2HPD.shape[3]
        self.kv_L2SHTD[:, :, slot, :, :tokens] = kv_L2HPD
        self.kv_L2SHTD[:, :, slot, :, tokens:] = 0

    def move(self, slot: int, to: int) -> None:
        self.kv_L2SHTD[:, :, to] = self.kv_L2SHTD[:, :, slot]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # unused: masks and positions are given

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.kv_L2SHTD.shape[4], 0
