"""Where a model's parameters live: a shard of each in every rank (FSDP2, ZeRO-3).

A rank keeps its shard of the float32 parameters and of the optimiser's moments. A layer is gathered before its
forward and again before its backward, in the dtype that the model computes with; its gradients are added up over
ranks in float32, and each rank keeps the sum of its shard. Sums, not means: they are divided once, by the optimiser.

The embedding, the last norm and the head are one group, the root's. They stay gathered from the forward to the end
of the backward, so that the gradient that the head makes by hand has a whole matrix to lie in; FSDP takes it from
there with what autograd adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flowgraph.models.names import by_file_name

from .layers import head_of
from .lora import merged
from .ranks import Ranks
from .registry import LoraOptions
from .save import assemble, save_model, saved_tensors


class _Backbone(torch.nn.Module):
    """Its forward is the backbone's alone; the head's matrix belongs to it all the same."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        hidden_BLD: Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden_BLD


class Sharded:
    """A `Place`. model: loaded alike on every rank in the dtype that it computes with; its parameters are replaced.

    layers: the modules that are gathered one at a time
    """

    def __init__(
        self,
        model: Any,
        layers: Iterable[torch.nn.Module],
        ranks: Ranks,
        lora: LoraOptions | None = None,
    ) -> None:
        self._model, self._first, self._lora = model, ranks.first, lora
        self._dtype: torch.dtype = model.dtype
        wide = torch.promote_types(self._dtype, torch.float32)
        kept = {p.dtype for p in model.parameters()} - {self._dtype}
        if kept:
            raise NotImplementedError(
                f"{type(model).__name__} keeps some parameters in {kept.pop()} beside {self._dtype}, which ranks "
                "can't share out; use dtype float32"
            )
        options: dict[str, Any] = {
            "mesh": ranks.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self._dtype, reduce_dtype=wide, cast_forward_inputs=False
            ),
        }
        for layer in layers:  # one at a time, so that only one exists twice
            _widen(layer, wide)
            fully_shard(layer, **options)
        _widen(model, wide)
        self._root = _Backbone(model)
        fully_shard(self._root, reshard_after_forward=False, **options)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                _sum(module)
        self._head = head_of(model)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        hidden_BLD: Tensor = self._root(**inputs)
        return hidden_BLD

    def backward(self, hidden_UD: Tensor, dhidden_UD: Tensor) -> None:
        # All ranks add up the same parameters, also one whose micro-batch predicts nothing.
        for parameter in self._head.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.autograd.backward(hidden_UD, dhidden_UD)

    def done(self) -> None:
        assert isinstance(self._root, FSDPModule)
        self._root.reshard()  # else the next forward would still see these values

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        parameters: Iterable[torch.nn.Parameter] = self._model.parameters()
        return parameters

    def weights(self, names: Set[str]) -> dict[str, Tensor]:
        gathered = self._gathered()
        return by_file_name(gathered, names) if self._first else {}

    def save(self, model_dir: str, directory: str) -> None:
        gathered = self._gathered()
        if self._first:
            save_model(assemble(self._model, gathered), model_dir, directory)

    @torch.no_grad()
    def _gathered(self) -> dict[str, Tensor]:
        """All parameters and saved buffers by the model's names, on the first rank; the others only help."""
        found: dict[str, Tensor] = {}
        for name, tensor in saved_tensors(self._model).items():
            here: Any = tensor.to(self._dtype) if isinstance(tensor, DTensor) else None
            whole = tensor if here is None else here.full_tensor()
            if self._first:
                found[name] = whole
        return merged(found, self._lora)


def _sum(module: FSDPModule) -> None:
    """Gradients are added up over ranks. FSDP's own ways, a mean and a scaled sum, are none that gloo has."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _widen(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: buffers stay as the model made them."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype)
