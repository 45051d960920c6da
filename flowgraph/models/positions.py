"""The positions that an indexer of a transformers model lets each token attend to: read, and put in.

DeepSeek-V3.2's indexer scores all positions for every token, and attention reads the best k of them. A token with fewer
than k positions before it is given some that lie behind it, which attention masks; they are no choice.

Shapes: T tokens of a forward, its batch of B lines of S tokens flattened; L layers, K positions chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from flowgraph.errors import ModelError
from flowgraph.models.choices import Captured

KNOWN = ("DeepseekV32Indexer",)


def has_indexer(model: Any) -> bool:
    return any(hasattr(module, "indexer") for module in model.modules())


class Positions:
    """The indexers of a causal model of transformers, one in every layer.

    layers: of the model; top_k: positions that a token may attend to. Raises ModelError for a model without an indexer
    in each layer, one of a class that is not known, or an attention that doesn't take them from it.
    """

    def __init__(self, model: Any) -> None:
        name = type(model).__name__
        found = [module.indexer for module in model.modules() if hasattr(module, "indexer")]
        layers = int(model.config.get_text_config().num_hidden_layers)
        classes = {type(indexer).__name__ for indexer in found}
        if len(found) != layers or classes - set(KNOWN):
            what = f"{len(found)} indexers in {layers} layers" if not found else f"indexers {sorted(classes)}"
            raise ModelError(
                f"{name} has {what}", f"take a model with one in every layer: {', '.join(KNOWN)}"
            )
        if (attention := model.config._attn_implementation) not in ("eager", "sdpa", "flowgraph_slots"):
            raise ModelError(
                f"attention {attention!r} of {name} can't be told its positions", "use pack: padded"
            )
        self.layers, self.top_k = layers, int(found[0].index_topk)
        self._indexers: list[Any] = found

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Inside, the last forward's positions are in what this gives; inside `force` those that were put in.

        They are i64[T, layer, at most K], in the flattened batch; a position behind its token is none.
        """
        captured = Captured(self.layers, tuple(range(self.layers)))
        with ExitStack() as hooks:
            for layer, indexer in enumerate(self._indexers):
                hooks.enter_context(indexer.register_forward_hook(_reader(captured, layer)))
            yield captured

    @contextmanager
    def force(self, indices: Tensor, given: Tensor) -> Iterator[None]:
        """Inside, each forward attends to these positions. Whatever happens, indexers choose for themselves afterwards.

        indices: i64[T, layer, K], in the flattened batch; one that is there twice counts once
        given: bool[T]; where it is False the indices are not read, and the indexers' own choice counts

        Raises ValueError for another shape, and inside for another T or a position of another line.
        """
        wanted = [len(given), self.layers, self.top_k]
        if given.dtype != torch.bool or list(indices.shape) != wanted:
            raise ValueError(
                f"positions are {list(indices.shape)} beside {given.dtype} {list(given.shape)}, expected {wanted} "
                "beside bool [tokens]"
            )
        with ExitStack() as hooks:
            for layer, indexer in enumerate(self._indexers):
                hooks.enter_context(indexer.register_forward_hook(_writer(indices[:, layer], given)))
            yield


def _starts(chosen_BSK: Tensor) -> Tensor:
    """[B, 1, 1]: where each line begins in the flattened batch."""
    return (torch.arange(len(chosen_BSK)) * chosen_BSK.shape[1])[:, None, None]


def _reader(captured: Captured, layer: int) -> Callable[..., None]:
    def read(indexer: Any, _: Any, chosen_BSK: Tensor) -> None:
        captured.take(layer, (chosen_BSK.to(torch.int64) + _starts(chosen_BSK)).flatten(0, 1))

    return read


def _writer(indices_TK: Tensor, given_T: Tensor) -> Callable[..., Tensor]:
    def put(indexer: Any, _: Any, own_BSK: Tensor) -> Tensor:
        lines, length, width = own_BSK.shape
        if len(given_T) != lines * length:
            raise ValueError(
                f"positions of {len(given_T)} tokens were given, and the forward has {lines * length}"
            )
        given_BS1 = given_T.view(lines, length, 1)
        put_BSK = indices_TK.view(lines, length, -1) - _starts(own_BSK)
        if (given_BS1 & ((put_BSK < 0) | (put_BSK >= length))).any():
            raise ValueError("a token was given a position of another line")
        # A forward of fewer than K tokens gives fewer choices: what it repeats then counts once.
        last_BSK = own_BSK[..., -1:].expand(-1, -1, max(0, put_BSK.shape[2] - width))
        return torch.where(given_BS1, put_BSK.to(own_BSK.dtype), torch.cat([own_BSK, last_BSK], dim=-1))

    return put
