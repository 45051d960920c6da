"""AdamW on float32 masters, one pass over memory.

A step takes each gradient in pieces that stay in the cache: piece → float32 → AdamW on master and moments →
back into the model's parameter. So float32 gradients of the whole model never exist, unless several
micro-batches have to be added up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# float32 elements of one piece: 2 MB of scratch, 8 MB with master and moments.
_PIECE = 1 << 19


class _Slot(NamedTuple):
    parameter: Tensor
    master: Tensor  # float32; the parameter itself when that is float32
    mean: Tensor
    square: Tensor
    decay: float


class MasterAdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) with one clip of the global gradient norm before it.

    lr: learning rate; the first `warmup` steps rise to it linearly (step s uses lr·s/warmup)
    weight_decay: applied to matrices, not to biases and norms
    clip: largest global norm of the gradient
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip: float,
        warmup: int,
    ) -> None:
        self._slots = [_slot(parameter, weight_decay) for parameter in parameters]
        self._lr, self._betas, self._eps, self._clip, self._warmup = lr, betas, eps, clip, warmup
        self._steps = 0
        self._sums: list[Tensor] = []
        self._summed = 0
        self._scratch = torch.empty(min(_PIECE, max(slot.master.numel() for slot in self._slots)))

    def accumulate(self) -> None:
        """Add the gradients to float32 sums and clear them: after each micro-batch, if there are several."""
        if not self._sums:
            self._sums = [torch.empty_like(slot.master) for slot in self._slots]
        for slot, total in zip(self._slots, self._sums, strict=True):
            if self._summed == 0:
                total.zero_()
            if slot.parameter.grad is not None:
                total += slot.parameter.grad
                slot.parameter.grad = None
        self._summed += 1

    def drop(self) -> None:
        """Forget all gradients."""
        self._summed = 0
        for slot in self._slots:
            slot.parameter.grad = None

    @torch.no_grad()
    def step(self, divisor: float = 1.0) -> tuple[float, float]:
        """Clip, update, forget the gradients. Returns (norm before clipping, learning rate).

        divisor: of the gradients, which are sums up to here

        Raises FloatingPointError for a norm that is not finite; nothing has changed then.
        """
        gradients = self._gradients()
        norm = self._norm(gradients) / divisor
        if not bool(torch.isfinite(norm)):
            self.drop()
            raise FloatingPointError(f"the gradient norm is {norm.item()}: no update was made")
        self._steps += 1
        lr = self._lr * min(1.0, self._steps / self._warmup) if self._warmup else self._lr
        # The fused kernel divides the gradient by this.
        scale = torch.clamp(norm / self._clip, min=1.0) * divisor
        count = torch.tensor(float(self._steps))
        for slot, gradient in zip(self._slots, gradients, strict=True):
            if gradient is not None:
                self._update(slot, gradient.reshape(-1), lr, scale, count)
        self.drop()
        return float(norm), lr

    def _gradients(self) -> list[Tensor | None]:
        if self._summed:
            return list(self._sums)
        return [slot.parameter.grad for slot in self._slots]

    def _norm(self, gradients: Iterable[Tensor | None]) -> Tensor:
        # By pieces: vector_norm(dtype=float32) would first copy a whole bfloat16 tensor.
        squares = [
            torch.linalg.vector_norm(self._scratch[: len(piece)].copy_(piece))
            for gradient in gradients
            if gradient is not None
            for piece in torch.split(gradient.reshape(-1), _PIECE)
        ]
        return torch.linalg.vector_norm(torch.stack(squares)) if squares else torch.zeros(())

    def _update(self, slot: _Slot, gradient: Tensor, lr: float, divisor: Tensor, count: Tensor) -> None:
        views = [torch.split(x.detach().view(-1), _PIECE) for x in slot[:4]]
        for parameter, master, mean, square, piece in zip(*views, torch.split(gradient, _PIECE), strict=True):
            scaled = self._scratch[: len(piece)].copy_(piece)
            torch._fused_adamw_(
                [master],
                [scaled],
                [mean],
                [square],
                [],
                [count],
                lr=lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=slot.decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
            )
            if parameter.dtype != master.dtype:
                parameter.copy_(master)


def _slot(parameter: torch.nn.Parameter, weight_decay: float) -> _Slot:
    data = parameter.detach()
    if not data.is_contiguous():
        raise ValueError("the optimiser needs contiguous parameters")
    master = data if data.dtype == torch.float32 else data.float()
    decay = weight_decay if data.ndim > 1 else 0.0
    return _Slot(parameter, master, torch.zeros_like(master), torch.zeros_like(master), decay)
