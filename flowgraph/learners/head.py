"""Output head, token loss and their gradient, a block of positions at a time.

A token loss is element-wise, so the logits of a block can be turned into their own gradient as soon as they
exist: logits → log-probabilities and entropy → the loss and its derivative → dlogits, in place. Nothing of
size [positions, vocabulary] outlives a block or enters an autograd graph (the idea of Liger's fused linear
cross entropy, arXiv 2410.10989, extended to any element-wise loss).

Shapes: N masked tokens, U distinct positions that predict them (several tokens may share one), D hidden size,
V vocabulary, C predicting positions of one block; T = B·L packed positions; I distinct token ids among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .protocol import TokenLoss

# Positions of one block: large enough for fast matrix products, 50 MB of bfloat16 logits at V = 49152.
_BLOCK = 512
# float32 elements that the softmax works on at a time: its five passes then stay in the cache.
_CACHED = 1 << 19


class Targets(NamedTuple):
    """Masked token n is token target_N[n], predicted by hidden state which_N[n]; which_N ascends."""

    which_N: Tensor
    target_N: Tensor


class HeadResult(NamedTuple):
    """Sums over the masked tokens, each already divided by `total`, and the gradient of the hidden states."""

    loss: float
    entropy: float
    metrics: dict[str, float]
    dhidden_UD: Tensor


class Head:
    """The output embedding of a model: logits = (hidden · weightᵀ + bias) / temperature."""

    def __init__(self, layer: torch.nn.Module, temperature: float) -> None:
        self._weight_VD: torch.nn.Parameter = layer.weight  # type: ignore[assignment]
        self._bias_V: torch.nn.Parameter | None = getattr(layer, "bias", None)
        self._temperature = temperature
        self._gradient_VD: Tensor | None = None

    @torch.no_grad()
    def logprobs(self, hidden_UD: Tensor, targets: Targets) -> Tensor:
        """f32[N]."""
        parts = []
        for rows, part in _blocks(hidden_UD, targets):
            logits_CV = self.logits(hidden_UD[rows])
            parts.append(_softmax_in_place(logits_CV, part, self._temperature, with_entropy=False)[0])
        return torch.cat(parts)

    @torch.no_grad()
    def backward(
        self, hidden_UD: Tensor, targets: Targets, fields: Mapping[str, Tensor], loss: TokenLoss, total: int
    ) -> HeadResult:
        """Sum of the loss over tokens / total; its gradient is added to the weight's, returned for hidden.

        total: the global number of masked tokens. Raises FloatingPointError for a loss that is not finite.
        """
        dhidden_UD = torch.empty_like(hidden_UD)
        sums: dict[str, float] = {}
        loss_sum, entropy_sum, first = 0.0, 0.0, 0
        for rows, part in _blocks(hidden_UD, targets):
            logits_CV = self.logits(hidden_UD[rows])
            logprob_N, entropy_N = _softmax_in_place(logits_CV, part, self._temperature)
            here = {name: values[first : first + len(logprob_N)] for name, values in fields.items()}
            first += len(logprob_N)
            value, grad_N, metrics = _token_loss(loss, logprob_N, entropy_N, here)
            loss_sum += value / total
            entropy_sum += float(entropy_N.sum()) / total
            for name, metric_sum in metrics.items():
                sums[name] = sums.get(name, 0.0) + metric_sum / total
            dlogits_CV = _dlogits_in_place(logits_CV, part, logprob_N, grad_N / (total * self._temperature))
            torch.mm(dlogits_CV, self._weight_VD, out=dhidden_UD[rows])
            self._add_gradients(dlogits_CV, hidden_UD[rows])
        return HeadResult(loss_sum, entropy_sum, sums, dhidden_UD)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """hidden · weightᵀ + bias, before the temperature."""
        logits_CV = hidden_CD @ self._weight_VD.T
        return logits_CV if self._bias_V is None else logits_CV.add_(self._bias_V)

    def _add_gradients(self, dlogits_CV: Tensor, hidden_CD: Tensor) -> None:
        if self._weight_VD.grad is None:
            # One buffer for all steps: at this size, fresh memory costs as much as the product.
            if self._gradient_VD is None:
                self._gradient_VD = torch.empty_like(self._weight_VD)
            self._weight_VD.grad = torch.mm(dlogits_CV.T, hidden_CD, out=self._gradient_VD)
        else:
            self._weight_VD.grad += dlogits_CV.T @ hidden_CD
        if self._bias_V is not None:
            dbias_V = dlogits_CV.sum(0)
            self._bias_V.grad = dbias_V if self._bias_V.grad is None else self._bias_V.grad + dbias_V


class TiedEmbedding:
    """The input side of a matrix that is also the head's: its gradient is added where tokens are.

    autograd would make a second gradient of the whole [V,D] matrix, nearly all zeros, and add the two.
    """

    def __init__(self, layer: torch.nn.Embedding) -> None:
        self._layer = layer

    def __call__(self, token_BL: Tensor) -> Tensor:
        """[B,L] → a leaf [B,L,D] whose gradient `backward` takes."""
        embedded_BLD: Tensor = self._layer(token_BL)
        return embedded_BLD.detach().requires_grad_()

    @torch.no_grad()
    def backward(self, token_BL: Tensor, grad_BLD: Tensor) -> None:
        """Add to the matrix's gradient, which the head has made; like torch, a padding id gets none."""
        assert self._layer.weight.grad is not None
        order_T = torch.argsort(token_BL.reshape(-1), stable=True)
        id_I, count_I = torch.unique_consecutive(token_BL.reshape(-1)[order_T], return_counts=True)
        # Bags sum in float32 and in a fixed order.
        sum_ID = F.embedding_bag(order_T, grad_BLD.flatten(0, 1), count_I.cumsum(0) - count_I, mode="sum")
        if self._layer.padding_idx is not None:
            sum_ID[id_I == self._layer.padding_idx] = 0
        self._layer.weight.grad.index_add_(0, id_I, sum_ID)


def _blocks(hidden_UD: Tensor, targets: Targets) -> Iterator[tuple[slice, Targets]]:
    """Blocks of hidden states with their tokens, counted from the block's first row."""
    for first in range(0, len(hidden_UD), _BLOCK):
        last = min(first + _BLOCK, len(hidden_UD))
        low, high = torch.searchsorted(targets.which_N, torch.tensor([first, last])).tolist()
        yield slice(first, last), Targets(targets.which_N[low:high] - first, targets.target_N[low:high])


def _softmax_in_place(
    logits_CV: Tensor, targets: Targets, temperature: float, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy per token, f32[N] each; the logits become probabilities.

    log p_t = z_t - log Σ exp z and H = log Σ exp z - Σ p z, with z the logits minus their largest.
    Without entropy the second result is empty and the logits are left in no defined state.
    """
    logsum_C1 = torch.empty(len(logits_CV), 1)
    entropy_C = torch.empty(len(logits_CV))
    target_logit_N = torch.empty(len(targets.target_N))
    step = max(1, _CACHED // logits_CV.shape[1])
    # Two scratch buffers for the whole block: fresh ones cost more in page faults than the arithmetic.
    z_SV, e_SV = torch.empty(2, min(step, len(logits_CV)), logits_CV.shape[1]).unbind()
    bounds = torch.searchsorted(targets.which_N, torch.arange(0, len(logits_CV) + step, step)).tolist()
    for i, part_CV in enumerate(torch.split(logits_CV, step)):
        rows, tokens = slice(i * step, i * step + len(part_CV)), slice(bounds[i], bounds[i + 1])
        z_CV, e_CV = z_SV[: len(part_CV)].copy_(part_CV), e_SV[: len(part_CV)]
        if temperature != 1.0:
            z_CV /= temperature
        z_CV -= z_CV.amax(-1, keepdim=True)
        target_logit_N[tokens] = z_CV[targets.which_N[tokens] - i * step, targets.target_N[tokens]]
        torch.exp(z_CV, out=e_CV)
        sum_C1 = e_CV.sum(-1, keepdim=True)
        logsum_C1[rows] = sum_C1.log()
        if with_entropy:
            mean_C = torch.linalg.vecdot(e_CV, z_CV) / sum_C1[:, 0]
            entropy_C[rows] = logsum_C1[rows, 0] - mean_C
            torch.mul(e_CV, 1 / sum_C1, out=part_CV)
    logprob_N = target_logit_N - logsum_C1[targets.which_N, 0]
    return logprob_N, entropy_C[targets.which_N] if with_entropy else torch.empty(0)


def _token_loss(
    loss: TokenLoss, logprob_N: Tensor, entropy_N: Tensor, fields: Mapping[str, Tensor]
) -> tuple[float, Tensor, dict[str, float]]:
    """Sum of the loss, its derivative by each log-probability, and the sum of each metric."""
    with torch.enable_grad():
        leaf_N = logprob_N.requires_grad_()
        value_N, metrics = loss(leaf_N, entropy_N, fields)
        if value_N.shape != leaf_N.shape:
            raise ValueError(f"the loss returned shape {list(value_N.shape)} for {len(leaf_N)} tokens")
        value = value_N.sum()
    if not bool(torch.isfinite(value.detach())):
        raise FloatingPointError(f"the loss is {value.item()}: no update was made")
    grad_N = torch.zeros_like(leaf_N)
    if value.requires_grad:
        (derivative_N,) = torch.autograd.grad(value, leaf_N, allow_unused=True)
        grad_N = grad_N if derivative_N is None else derivative_N
    logprob_N.requires_grad_(False)
    return (
        float(value.detach()),
        grad_N,
        {name: float(metric.detach().sum()) for name, metric in metrics.items()},
    )


def _dlogits_in_place(probs_CV: Tensor, targets: Targets, logprob_N: Tensor, grad_N: Tensor) -> Tensor:
    """d(Σ grad·logp)/dlogits = Σ_n grad_n (onehot(target_n) - p), over the tokens n that a row predicts."""
    grad_C = torch.zeros(len(probs_CV)).index_add_(0, targets.which_N, grad_N)
    probs_CV.mul_(-grad_C[:, None].to(probs_CV.dtype))
    # The entries at targets are set from float32: grad·(1 - p) of a confident token would drown in the
    # rounding of p. Rows that sampled the same token share an entry, and all write the same sum into it.
    pair_N = targets.which_N * probs_CV.shape[1] + targets.target_N
    pairs, same_N = torch.unique(pair_N, return_inverse=True)
    onehot_N = torch.zeros(len(pairs)).index_add_(0, same_N, grad_N)[same_N]
    entry_N = onehot_N - grad_C[targets.which_N] * logprob_N.exp()
    probs_CV[targets.which_N, targets.target_N] = entry_N.to(probs_CV.dtype)
    return probs_CV
