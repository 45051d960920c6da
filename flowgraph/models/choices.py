"""The experts that a transformers model chooses: what was executed is read, and what was recorded is put in its place.

A router gives each token k experts and their weights. Here the experts are read where they are executed, at the door
of the layer's experts, and put in behind the router, before anything has used its own. The weights of experts that
were put in are made anew from the router's logits, as the router makes its own, so that the gradient reaches it.

Shapes: T tokens of a forward, its batch and sequence flattened; L layers, E experts of a layer, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowgraph.errors import ModelError
from flowgraph.models.facts import layers_with_experts


def _softmax(router: Any, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    weights_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(1, chosen_TK)
    if getattr(router, "norm_topk_prob", True):
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK


def _sigmoid(router: Any, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    weights_TK = logits_TE.sigmoid().gather(1, chosen_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * float(router.routed_scaling_factor)


# Class of a router → (itself, its logits, a choice) → the weights of the choice, before they get its own dtype.
WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "MixtralTopKRouter": _softmax,
    "DeepseekV3TopkRouter": _sigmoid,
    "DeepseekV32TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
}


class Captured:
    """What the last whole forward chose, in those of a model's layers that make a choice; they come in order.

    A backward that computes layers again, the last one first, adds nothing.
    """

    def __init__(self, layers: int, choosing: tuple[int, ...]) -> None:
        self._layers, self._at = layers, choosing
        self._coming: list[Tensor] = []
        self._chosen: list[Tensor] = []

    @property
    def indices(self) -> Tensor:
        """i64[T, layer, k]; 0 in layers without a choice. RuntimeError when no forward came to its last layer."""
        if not self._chosen:
            raise RuntimeError("no forward of the model was completed while its choices were captured")
        some_TMK = torch.stack(self._chosen, dim=1)
        if len(self._at) == self._layers:
            return some_TMK
        whole_TLK = some_TMK.new_zeros(len(some_TMK), self._layers, some_TMK.shape[2])
        whole_TLK[:, list(self._at)] = some_TMK
        return whole_TLK

    def take(self, layer: int, chosen_TK: Tensor) -> None:
        """A layer has chosen."""
        if layer == self._at[0]:
            self._coming = []
        if self._at[len(self._coming) :][:1] != (layer,):
            return
        self._coming.append(chosen_TK)
        if len(self._coming) == len(self._at):
            self._chosen = self._coming


class Choices:
    """The layers with experts of a causal model of transformers.

    layers: of the whole model; experts, top_k: of each layer that has experts; moe_layers: the numbers of those

    Raises ModelError for a model without experts, or one whose routers are of a class that is not in `WEIGHTS`, and
    unless each layer, with its own choice put in, gives what it gives by itself, bit for bit.
    """

    def __init__(self, model: Any) -> None:
        name = type(model).__name__
        layers = getattr(model.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(f"the experts of {name} can't be read: it has no list of layers", _help())
        self.layers = len(layers)
        found = {at: _block(layer) for at, layer in enumerate(layers)}
        self._blocks: dict[int, Any] = {at: block for at, block in found.items() if block is not None}
        self.moe_layers = tuple(self._blocks)
        if lost := set(layers_with_experts(name for name, _ in model.named_parameters())) - set(self._blocks):
            raise ModelError(f"the experts of {name} can't be read: layer {min(lost)} has no gate", _help())
        if not self._blocks:
            raise ModelError(
                f"{name} has no layer with experts", "record nothing, or take a model with experts"
            )
        routers = [block.gate for block in self._blocks.values()]
        if unknown := sorted({type(router).__name__ for router in routers} - WEIGHTS.keys()):
            raise ModelError(f"the experts of {name} can't be put in: {unknown[0]} is not known", _help())
        counts = {(int(router.num_experts), int(router.top_k)) for router in routers}
        if len(counts) > 1:
            raise ModelError(
                f"{name} has layers of (experts, chosen) {sorted(counts)}", "take one with equal ones"
            )
        ((self.experts, self.top_k),) = counts
        self._forced = False
        for layer, block in self._blocks.items():
            self._check(layer, block, name)

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Inside, the last forward's executed choices are in what this gives; also those that `force` put in."""
        captured = Captured(self.layers, self.moe_layers)
        with ExitStack() as hooks:
            for layer, block in self._blocks.items():
                hooks.enter_context(block.experts.register_forward_pre_hook(_reader(captured, layer)))
            yield captured

    @contextmanager
    def force(self, indices: Tensor, given: Tensor) -> Iterator[None]:
        """Inside, each forward takes these choices. Whatever happens inside, routers choose for themselves afterwards.

        indices: integers [T, layer, k], what they hold of layers without experts is not read
        given: bool[T]; where it is False the indices are not read, and the routers' own choice counts

        Raises ValueError for another shape, an index that is no expert, or an expert that is chosen twice; and inside,
        for a forward of other than T tokens. RuntimeError inside another `force`.
        """
        if self._forced:
            raise RuntimeError("choices are put in already: leave that `force` first")
        self._check_given(indices, given)
        self._forced = True
        try:
            with ExitStack() as hooks:
                for layer, block in self._blocks.items():
                    chosen_TK = indices[:, layer].to(torch.int64)
                    hooks.enter_context(block.gate.register_forward_hook(_writer(chosen_TK, given[:, None])))
                yield
        finally:
            self._forced = False

    def _check_given(self, indices: Tensor, given: Tensor) -> None:
        wanted = (len(given), self.layers, self.top_k)
        if given.dtype != torch.bool or given.ndim != 1:
            raise ValueError(f"given is {given.dtype} {list(given.shape)}, expected bool [tokens]")
        if indices.shape != wanted or indices.dtype.is_floating_point or indices.dtype == torch.bool:
            raise ValueError(
                f"indices are {indices.dtype} {list(indices.shape)}, expected integers {list(wanted)}: tokens, layers,"
                " experts of a token"
            )
        read_NMK = indices[given][:, list(self.moe_layers)].to(torch.int64)
        ordered_NMK = read_NMK.sort(dim=-1).values
        for wrong_NMK, says in (
            ((read_NMK < 0) | (read_NMK >= self.experts), f"expected 0 to {self.experts - 1}"),
            (ordered_NMK[..., 1:] == ordered_NMK[..., :-1], "expected distinct experts"),
        ):
            if wrong_NMK.any():
                row, layer = wrong_NMK.any(dim=-1).nonzero()[0].tolist()
                token = int(given.nonzero()[row])
                raise ValueError(
                    f"indices of layer {self.moe_layers[layer]}, token {token}: experts"
                    f" {read_NMK[row, layer].tolist()}, {says}"
                )

    @torch.no_grad()
    def _check(self, layer: int, block: Any, name: str) -> None:
        """Put in what the layer chooses by itself, then something else, for a few tokens of noise."""
        weight = next(block.experts.parameters())
        random = torch.Generator().manual_seed(0)
        hidden_1TD = torch.randn(1, 4, block.gate.hidden_dim, generator=random).to(weight)
        given = torch.tensor([True, True, False, True], device=weight.device)

        def run(chosen_TK: Tensor | None, given: Tensor) -> tuple[Tensor, Tensor]:
            captured = Captured(1, (0,))
            with ExitStack() as hooks:
                hooks.enter_context(block.experts.register_forward_pre_hook(_reader(captured, 0)))
                if chosen_TK is not None:
                    hooks.enter_context(block.gate.register_forward_hook(_writer(chosen_TK, given[:, None])))
                return block(hidden_1TD), captured.indices[:, 0]

        out, own_TK = run(None, given)
        again, same_TK = run(own_TK, torch.ones_like(given))
        other_TK = (own_TK + 1) % self.experts
        _, executed_TK = run(other_TK, given)
        equal = torch.equal(out, again) and torch.equal(own_TK, same_TK)
        if not equal or not torch.equal(executed_TK, torch.where(given[:, None], other_TK, own_TK)):
            router = type(block.gate).__name__
            raise ModelError(
                f"the experts of {name} can't be put in: layer {layer} gives something else with its own choice"
                f" ({router} of this version of transformers is another than the one that is known)",
                _help(),
            )


def _block(layer: nn.Module) -> Any:
    """The module of a layer that holds a router, `gate`, and its `experts`; None where there is none."""
    return next((m for m in layer.modules() if hasattr(m, "experts") and hasattr(m, "gate")), None)


def _reader(captured: Captured, layer: int) -> Callable[..., None]:
    return lambda experts, given: captured.take(layer, given[1])


def _writer(chosen_TK: Tensor, given_T1: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A hook of a router; its output is (logits, weights of the chosen, the chosen)."""

    def put(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, weights_TK, own_TK = output
        if len(own_TK) != len(chosen_TK):
            raise ValueError(
                f"choices of {len(chosen_TK)} tokens were given, and the forward has {len(own_TK)}"
            )
        mixed_TK = torch.where(given_T1, chosen_TK, own_TK)
        return (
            logits_TE,
            WEIGHTS[type(router).__name__](router, logits_TE, mixed_TK).to(weights_TK.dtype),
            mixed_TK,
        )

    return put


def _help() -> str:
    return f"take a model whose routers are one of {', '.join(WEIGHTS)}"
