"""Where a model's parameters live: all of them in this process.

`Place` is what the learner asks of it; `Whole` is the answer of one process, `sharded.Sharded` that of several.

Shapes: B lines of L positions, D hidden size; U predicting positions; I distinct token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from flowgraph.models.names import by_file_name

from .head import TiedEmbedding
from .layers import head_of
from .lora import merged
from .registry import LoraOptions
from .save import assemble, save_model, saved_tensors


class Place(Protocol):
    """A causal model whose parameters lie in one process or in many; with many, each method is collective."""

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        """Hidden states after the backbone's last norm: [B,L,D]. The head's matrix is whole from here on.

        With gradients `backward` follows, without them `done`.
        """
        ...

    def backward(self, hidden_UD: Tensor, dhidden_UD: Tensor) -> None:
        """Add the backbone's gradients to those that the head has made.

        hidden_UD: taken from the last `forward`; dhidden_UD: the gradient of the loss by it
        """
        ...

    def done(self) -> None:
        """After a forward without gradients, and the head's work on it."""
        ...

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """What the optimiser updates, each with this process's part of the summed gradient after `backward`."""
        ...

    def weights(self, names: Set[str]) -> dict[str, Tensor]:
        """The whole model by the names of its files, in the dtype that it computes with; the first rank gets it."""
        ...

    def save(self, model_dir: str, directory: str) -> None:
        """See `save_model`; the first rank writes."""
        ...


class Whole:
    """A `Place`. The weights that it gives are views, but for those to which an adapter is added."""

    def __init__(self, model: Any, lora: LoraOptions | None = None) -> None:
        self._model, self._backbone, self._lora = model, model.base_model, lora
        self._embedding = _tied_embedding(model)
        self._looked_up: tuple[Tensor, Tensor] | None = (
            None  # ids, and the leaf that stands for their embeddings
        )

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        self._looked_up = None
        if self._embedding is not None and torch.is_grad_enabled():
            token_BL = inputs["input_ids"]
            self._looked_up = token_BL, self._embedding(token_BL)
            inputs = inputs | {"input_ids": None, "inputs_embeds": self._looked_up[1]}
        hidden_BLD: Tensor = self._backbone(**inputs).last_hidden_state
        return hidden_BLD

    def backward(self, hidden_UD: Tensor, dhidden_UD: Tensor) -> None:
        torch.autograd.backward(hidden_UD, dhidden_UD)
        if self._embedding is not None and self._looked_up is not None:
            token_BL, embedded_BLD = self._looked_up
            assert embedded_BLD.grad is not None
            self._embedding.backward(token_BL, embedded_BLD.grad)
        self._looked_up = None

    def done(self) -> None:
        pass

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        parameters: Iterable[torch.nn.Parameter] = self._model.parameters()
        return parameters

    def weights(self, names: Set[str]) -> dict[str, Tensor]:
        return by_file_name(self._tensors(), names)

    def save(self, model_dir: str, directory: str) -> None:
        model = self._model if self._lora is None else assemble(self._model, self._tensors())
        save_model(model, model_dir, directory)

    @torch.no_grad()
    def _tensors(self) -> dict[str, Tensor]:
        return merged(saved_tensors(self._model), self._lora)


def _tied_embedding(model: Any) -> TiedEmbedding | None:
    """Only for a plain embedding that is trained: one that scales or projects is left to autograd."""
    layer = model.get_input_embeddings()
    tied = layer.weight is head_of(model).weight and layer.weight.requires_grad
    return TiedEmbedding(layer) if tied and type(layer) is torch.nn.Embedding else None
