"""One optimiser step on float32 masters, one pass over memory.

A step takes each gradient in pieces that stay in the cache: piece → float32 → update of master and moments →
back into the model's parameter. So float32 gradients of the whole model never exist, unless several
micro-batches of a bfloat16 model have to be added up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

Schedule = Literal["constant", "linear", "cosine"]
Totals = Callable[[dict[str, float]], Mapping[str, float]]

# float32 elements of one piece: 2 MB of scratch, 8 MB with master and moments.
_PIECE = 1 << 19


def scale(step: int, schedule: Schedule, *, warmup: int, total_steps: int | None) -> float:
    """What the learning rate is multiplied by in step s = 1, 2, …, with W = warmup and T = total_steps.

    s ≤ W: s/W. Afterwards, with p = (s − 1 − W)/(T − W) in [0, 1]: constant 1; linear 1 − p; cosine
    (1 + cos πp)/2. The first step after the warm-up takes the full rate, step T still more than 0, later ones 0.
    """
    if step <= warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    assert total_steps is not None
    progress = min(1.0, (step - 1 - warmup) / (total_steps - warmup))
    return 1.0 - progress if schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2


class _Slot:
    """A parameter, its master (float32; the parameter itself where that is as wide), its moments and summed gradient.

    A parameter that is sharded over ranks (a DTensor) stands here with this rank's shard.
    """

    def __init__(self, parameter: torch.nn.Parameter, weight_decay: float, moments: int) -> None:
        self._parameter = parameter
        self.data = _local(parameter.detach())
        if not self.data.is_contiguous():
            raise ValueError("the optimiser needs contiguous parameters")
        self.master = self.data.to(torch.promote_types(self.data.dtype, torch.float32))
        self.moments = [torch.zeros_like(self.master) for _ in range(moments)]
        self.decay = weight_decay if self.data.ndim > 1 else 0.0
        self._sum: Tensor | None = None  # kept from step to step: fresh memory is slow
        self._summed = False

    @property
    def gradient(self) -> Tensor | None:
        """The sum of all micro-batches, of this rank's shard."""
        if self._summed:
            return self._sum
        return None if self._parameter.grad is None else _local(self._parameter.grad)

    def accumulate(self) -> None:
        gradient = self._parameter.grad
        if gradient is None or self.master is self.data:
            return  # `grad` itself is the sum
        if self._sum is None:
            self._sum = torch.empty_like(self.master)
        if not self._summed:
            self._sum.zero_()
        self._sum += _local(gradient)
        self._parameter.grad, self._summed = None, True

    def drop(self) -> None:
        self._parameter.grad, self._summed = None, False


class MasterOptimizer(ABC):
    """Gradients are sums: a step divides them by the one global denominator, clips their norm once, and updates.

    lr, warmup, schedule, total_steps: see `scale`
    weight_decay: applied to matrices, not to biases and norms, as lr·decay·parameter
    clip: largest global norm of the gradient
    totals: sums over the ranks among whom the parameters are sharded; the identity for one process
    """

    _moments = 0

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        clip: float,
        warmup: int,
        schedule: Schedule = "constant",
        total_steps: int | None = None,
        totals: Totals = dict,
    ) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._slots = [_Slot(parameter, weight_decay, self._moments) for parameter in trained]
        self._lr, self._clip, self._warmup = lr, clip, warmup
        self._schedule: Schedule = schedule
        self._total_steps, self._totals = total_steps, totals
        self._steps = 0
        largest = max((slot.master for slot in self._slots), key=torch.Tensor.numel, default=torch.empty(0))
        self._scratch = torch.empty(min(_PIECE, largest.numel()), dtype=largest.dtype)

    def accumulate(self) -> None:
        """Keep the gradients in float32 sums: after each micro-batch, if there are several."""
        for slot in self._slots:
            slot.accumulate()

    def drop(self) -> None:
        """Forget all gradients."""
        for slot in self._slots:
            slot.drop()

    def _gradients(self) -> list[Tensor | None]:
        """What a step would divide and clip, per trained parameter: this rank's shards."""
        return [slot.gradient for slot in self._slots]

    @torch.no_grad()
    def step(self, divisor: float = 1.0) -> tuple[float, float]:
        """Divide, clip, update, forget the gradients. Returns (norm before clipping, learning rate).

        divisor: the gradients are sums that still have to be divided by it
        Raises FloatingPointError for a norm that is not finite; nothing has changed then, on any rank.
        """
        norm = self._norm() / divisor
        if not math.isfinite(norm):
            self.drop()
            raise FloatingPointError(f"the gradient norm is {norm}: no update was made")
        self._steps += 1
        lr = self._lr * scale(self._steps, self._schedule, warmup=self._warmup, total_steps=self._total_steps)
        over = torch.tensor(divisor * max(1.0, norm / self._clip))
        for slot in self._slots:
            if slot.gradient is not None:
                self._update_slot(slot, slot.gradient, lr, over)
        self.drop()
        return norm, lr

    def _norm(self) -> float:
        # By pieces: vector_norm(dtype=float32) would first copy a whole bfloat16 tensor.
        norms = [
            torch.linalg.vector_norm(self._scratch[: len(piece)].copy_(piece))
            for gradient in self._gradients()
            if gradient is not None
            for piece in torch.split(gradient.reshape(-1), _PIECE)
        ]
        here = float(torch.linalg.vector_norm(torch.stack(norms).double()) ** 2) if norms else 0.0
        return math.sqrt(self._totals({"square": here})["square"])

    def _update_slot(self, slot: _Slot, gradient: Tensor, lr: float, over: Tensor) -> None:
        tensors = (slot.data, slot.master, gradient, *slot.moments)
        for data, master, piece, *moments in zip(
            *(torch.split(tensor.reshape(-1), _PIECE) for tensor in tensors), strict=True
        ):
            self._update(master, self._scratch[: len(piece)].copy_(piece), moments, lr, slot.decay, over)
            if data.dtype != master.dtype:
                data.copy_(master)

    @abstractmethod
    def _update(
        self, master: Tensor, gradient: Tensor, moments: list[Tensor], lr: float, decay: float, over: Tensor
    ) -> None:
        """Update a piece in place. gradient: float32, to be divided by `over`; may be overwritten."""


class MasterAdamW(MasterOptimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    _moments = 2

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        **options: Any,
    ) -> None:
        super().__init__(parameters, **options)
        self._betas, self._eps = betas, eps

    def _update(
        self, master: Tensor, gradient: Tensor, moments: list[Tensor], lr: float, decay: float, over: Tensor
    ) -> None:
        torch._fused_adamw_(
            [master],
            [gradient],
            [moments[0]],
            [moments[1]],
            [],
            [torch.tensor(float(self._steps))],
            lr=lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=over,  # the kernel divides the gradient by it
        )


class MasterSGD(MasterOptimizer):
    """θ ← θ − lr·(g + decay·θ): no momentum, no state."""

    def _update(
        self, master: Tensor, gradient: Tensor, moments: list[Tensor], lr: float, decay: float, over: Tensor
    ) -> None:
        master.mul_(1 - lr * decay).sub_(gradient.div_(over), alpha=lr)


def create_optimizer(
    kind: str,
    parameters: Iterable[torch.nn.Parameter],
    *,
    betas: tuple[float, float],
    eps: float,
    **options: Any,
) -> MasterOptimizer:
    """kind: adamw or sgd; betas and eps are AdamW's. Parameters that are not trained are left out."""
    if kind == "sgd":
        return MasterSGD(parameters, **options)
    return MasterAdamW(parameters, betas=betas, eps=eps, **options)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
