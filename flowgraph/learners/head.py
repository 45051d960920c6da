"""Output head, token loss and their gradient, a block of positions at a time.

A token loss is element-wise, so the logits of a block can be turned into their own gradient as soon as they
exist: logits → log-probabilities and entropy → the loss and its derivatives → dlogits, in place. Nothing of
size [positions, vocabulary] outlives a block or enters an autograd graph (the idea of Liger's fused linear
cross entropy, arXiv 2410.10989, extended to any element-wise loss).

A loss that looks across the tokens of a sequence (`token_loss(whole=True)`) has its derivatives only when all their
log-probabilities are there, so its block is the whole micro-batch: [U,V] logits at once, in the model's dtype (at
4096 positions and V = 49152 in bfloat16 403 MB instead of 50), still one softmax.

Shapes: N masked tokens, U distinct positions that predict them (several tokens may share one), M sequences, D hidden
size, V vocabulary, C predicting positions of one block; T = B·L packed positions; I distinct token ids among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .aggregate import factors, needs_counts
from .metrics import check_names
from .protocol import Aggregation, Losses, TokenLoss, Tokens

# Positions of one block: large enough for fast matrix products, 50 MB of bfloat16 logits at V = 49152.
_BLOCK = 512
# float32 elements that the softmax works on at a time: its five passes then stay in the cache.
_CACHED = 1 << 19


class Targets(NamedTuple):
    """Masked token n is token target_N[n], predicted by hidden state which_N[n]; which_N ascends."""

    which_N: Tensor
    target_N: Tensor


class Given(NamedTuple):
    """What the loss of N masked tokens reads besides (see `Tokens`). fields: name → [N]; sequence_N < sequences."""

    fields: Mapping[str, Tensor]
    sequence_N: Tensor
    sequences: int


class HeadResult(NamedTuple):
    """Sums over the tokens of one micro-batch, nothing divided yet.

    sums: loss (of kept tokens, by `aggregate.factors`), entropy and the loss's metrics (of all masked tokens), and how
        many tokens and sequences are kept
    spread: name → [N], the loss's metrics whose distribution is told
    dhidden_UD: gradient of the summed loss
    """

    sums: dict[str, float]
    spread: dict[str, Tensor]
    dhidden_UD: Tensor


class TokenHead(Protocol):
    """What makes of hidden states that which a loss reads of each masked token."""

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """[C,V], as the model's own forward gives them; V = 1 for a value."""
        ...

    def read(self, hidden_UD: Tensor, targets: Targets) -> Tensor:
        """f32[N]: the log-probability of each token, or its value."""
        ...

    def backward(
        self, hidden_UD: Tensor, targets: Targets, given: Given, loss: TokenLoss, mode: Aggregation
    ) -> HeadResult:
        """The summed loss; its gradient is added to the head's weights, and returned for hidden."""
        ...


class Head:
    """The output embedding of a model: logits = (hidden · weightᵀ + bias) / temperature."""

    def __init__(self, layer: torch.nn.Module, temperature: float) -> None:
        self._layer = layer
        self._temperature = temperature
        self._gradient_VD: Tensor | None = None

    @property
    def _weight_VD(self) -> torch.nn.Parameter:
        """As the layer has it now: where parameters are sharded it is another one once it is gathered."""
        weight: torch.nn.Parameter = self._layer.weight  # type: ignore[assignment]
        return weight

    @property
    def _bias_V(self) -> torch.nn.Parameter | None:
        return getattr(self._layer, "bias", None)

    @torch.no_grad()
    def read(self, hidden_UD: Tensor, targets: Targets) -> Tensor:
        """f32[N]: log-probabilities."""
        parts = []
        for rows, part in _blocks(hidden_UD, targets, _BLOCK):
            logits_CV = self.logits(hidden_UD[rows])
            parts.append(_softmax_in_place(logits_CV, part, self._temperature, with_entropy=False)[0])
        return torch.cat(parts)

    @torch.no_grad()
    def backward(
        self, hidden_UD: Tensor, targets: Targets, given: Given, loss: TokenLoss, mode: Aggregation
    ) -> HeadResult:
        """The summed loss; its gradient is added to the weight's, and returned for hidden.

        Raises FloatingPointError for a loss that is not finite, ValueError or TypeError for one of the wrong form.
        """
        if marked(loss, "values"):
            raise ValueError(
                "the loss reads values, and this learner has none; set head: value under its owner's learner"
            )
        wide = widened(hidden_UD.dtype)
        masked_M = torch.bincount(given.sequence_N, minlength=given.sequences).to(wide)
        whole = marked(loss, "whole") or (marked(loss, "masks") and needs_counts(mode))
        dhidden_UD = torch.empty_like(hidden_UD)
        kept_M = torch.zeros_like(masked_M)
        sums: dict[str, float] = {}
        spread: dict[str, list[Tensor]] = {}
        first = 0
        for rows, part in _blocks(hidden_UD, targets, len(hidden_UD) if whole else _BLOCK):
            logits_CV = self.logits(hidden_UD[rows])
            logprob_N, entropy_C = _softmax_in_place(logits_CV, part, self._temperature)
            tokens = slice(first, first + len(logprob_N))
            first = tokens.stop
            seen = Tokens(
                logprob_N,
                entropy_C[part.which_N],
                {name: values[tokens] for name, values in given.fields.items()},
                given.sequence_N[tokens],
                given.sequences,
            )
            found = evaluate(loss, seen, mode, masked_M)
            kept_M += found.kept_M
            for name, value in found.sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, values in found.spread.items():
                spread.setdefault(name, []).append(values)
            dlogits_CV = _dlogits_in_place(
                logits_CV, part, seen.logprobs, entropy_C, found, self._temperature
            )
            torch.mm(dlogits_CV, self._weight_VD, out=dhidden_UD[rows])
            if self._weight_VD.requires_grad:
                self._add_gradients(dlogits_CV, hidden_UD[rows])
        sums["kept_tokens"] = float(kept_M.sum())
        sums["kept_sequences"] = float(torch.count_nonzero(kept_M))
        return HeadResult(sums, {name: torch.cat(parts) for name, parts in spread.items()}, dhidden_UD)

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
        if self._layer.weight.grad is None:  # no token was predicted
            self._layer.weight.grad = torch.zeros_like(self._layer.weight)
        order_T = torch.argsort(token_BL.reshape(-1), stable=True)
        id_I, count_I = torch.unique_consecutive(token_BL.reshape(-1)[order_T], return_counts=True)
        # Bags sum in float32 and in a fixed order.
        sum_ID = F.embedding_bag(order_T, grad_BLD.flatten(0, 1), count_I.cumsum(0) - count_I, mode="sum")
        if self._layer.padding_idx is not None:
            sum_ID[id_I == self._layer.padding_idx] = 0
        self._layer.weight.grad.index_add_(0, id_I, sum_ID)


def _blocks(hidden_UD: Tensor, targets: Targets, size: int) -> Iterator[tuple[slice, Targets]]:
    """Blocks of hidden states with their tokens, counted from the block's first row."""
    for first in range(0, len(hidden_UD), max(1, size)):
        last = min(first + size, len(hidden_UD))
        low, high = torch.searchsorted(targets.which_N, torch.tensor([first, last])).tolist()
        yield slice(first, last), Targets(targets.which_N[low:high] - first, targets.target_N[low:high])


def widened(dtype: torch.dtype) -> torch.dtype:
    """What log-probabilities and losses are computed in: float32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)


def marked(loss: TokenLoss, what: str) -> bool:
    """Whether `token_loss` marked it so."""
    return bool(getattr(loss, what, False))


def _softmax_in_place(
    logits_CV: Tensor, targets: Targets, temperature: float, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, f32[N], and entropy of each row, f32[C]; the logits become probabilities.

    log p_t = z_t - log Σ exp z and H = log Σ exp z - Σ p z, with z the logits minus their largest.
    Without entropy the second result and the logits are left in no defined state.
    """
    wide = widened(logits_CV.dtype)
    logsum_C1 = torch.empty(len(logits_CV), 1, dtype=wide)
    entropy_C = torch.empty(len(logits_CV), dtype=wide)
    target_logit_N = torch.empty(len(targets.target_N), dtype=wide)
    step = max(1, _CACHED // logits_CV.shape[1])
    # Two scratch buffers for the whole block: fresh ones cost more in page faults than the arithmetic.
    z_SV, e_SV = torch.empty(2, min(step, len(logits_CV)), logits_CV.shape[1], dtype=wide).unbind()
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
    return target_logit_N - logsum_C1[targets.which_N, 0], entropy_C


class Found(NamedTuple):
    """A block's loss: `HeadResult`'s sums and spread, kept tokens of each sequence, and the derivatives of the sum.

    dentropy_N: None where the loss does not use the entropy
    """

    sums: dict[str, float]
    spread: Mapping[str, Tensor]
    kept_M: Tensor
    dlogprob_N: Tensor
    dentropy_N: Tensor | None


def evaluate(loss: TokenLoss, seen: Tokens, mode: Aggregation, masked_M: Tensor) -> Found:
    """masked_M: f[M], the masked tokens of each sequence in the micro-batch."""
    with torch.enable_grad():
        leaves = seen.logprobs.requires_grad_(), seen.entropy.requires_grad_()
        said = _checked(loss, seen)
        kept_M, value_N = masked_M, said.loss
        if said.kept is not None:
            kept_M = torch.bincount(seen.sequence[said.kept], minlength=seen.sequences).to(masked_M.dtype)
            value_N = torch.where(said.kept, value_N, 0)
        value = (value_N * factors(mode, kept_M, seen.sequence)).sum()
    if not bool(torch.isfinite(value.detach())):
        raise FloatingPointError(f"the loss is {value.item()}: no update was made")
    derivatives: tuple[Tensor | None, ...] = (None, None)
    if value.requires_grad:
        derivatives = torch.autograd.grad(value, leaves, allow_unused=True)
    for leaf in leaves:
        leaf.requires_grad_(False)
    if said.kept is None:
        kept_M = torch.bincount(seen.sequence, minlength=seen.sequences).to(masked_M.dtype)
    told = {"entropy": seen.entropy, **said.metrics, **said.spread}
    sums = {name: float(values.detach().sum()) for name, values in told.items()}
    dlogprob_N = torch.zeros_like(leaves[0]) if derivatives[0] is None else derivatives[0]
    spread = {name: values.detach() for name, values in said.spread.items()}
    return Found({"loss": float(value.detach())} | sums, spread, kept_M, dlogprob_N, derivatives[1])


def _checked(loss: TokenLoss, seen: Tokens) -> Losses:
    """What the loss says, if it has the form that `Losses` states."""
    said = loss(seen)
    if not isinstance(said, Losses):
        raise TypeError(f"the loss returned a {type(said).__name__}; return flowgraph.Losses(loss, metrics)")
    check_names(said.metrics, said.spread)
    told = {"loss": said.loss, **said.metrics, **said.spread} | (
        {} if said.kept is None else {"kept": said.kept}
    )
    for name, values in told.items():
        if values.shape != seen.logprobs.shape:
            what = "the loss" if name == "loss" else f"the loss's {name}"
            raise ValueError(f"{what} returned shape {list(values.shape)} for {len(seen.logprobs)} tokens")
    if said.kept is not None and not marked(loss, "masks"):
        raise ValueError(
            "the loss leaves tokens out and is not marked so; decorate it with token_loss(masks=True)"
        )
    return said


def _dlogits_in_place(
    probs_CV: Tensor,
    targets: Targets,
    logprob_N: Tensor,
    entropy_C: Tensor,
    found: Found,
    temperature: float,
) -> Tensor:
    """The gradient of the logits: over the tokens n that a row predicts the sum of

        a_n (onehot(target_n) - p) - b_n p (log p + H),

    a and b being the derivatives by log-probability and entropy.
    """
    a_N = found.dlogprob_N / temperature
    # As -p (slope + b log p), with slope = Σ a + H Σ b.
    slope_C = torch.zeros_like(entropy_C).index_add_(0, targets.which_N, a_N)
    slope_N = slope_C[targets.which_N]
    if found.dentropy_N is None:
        probs_CV.mul_(-slope_C[:, None].to(probs_CV.dtype))
    else:
        b_C = torch.zeros_like(entropy_C).index_add_(0, targets.which_N, found.dentropy_N / temperature)
        slope_C += b_C * entropy_C
        slope_N = slope_C[targets.which_N] + b_C[targets.which_N] * logprob_N
        step = max(1, _CACHED // probs_CV.shape[1])
        for first in range(0, len(probs_CV), step):
            rows = slice(first, first + step)
            p_CV = probs_CV[rows].to(slope_C.dtype)
            probs_CV[rows] = -(p_CV * slope_C[rows, None] + torch.xlogy(p_CV, p_CV) * b_C[rows, None])
    # The entries at targets are set from float32: a·(1 - p) of a confident token would drown in the
    # rounding of p. Rows that sampled the same token share an entry, and all write the same sum into it.
    pair_N = targets.which_N * probs_CV.shape[1] + targets.target_N
    pairs, same_N = torch.unique(pair_N, return_inverse=True)
    onehot_N = torch.zeros(len(pairs), dtype=a_N.dtype).index_add_(0, same_N, a_N)[same_N]
    probs_CV[targets.which_N, targets.target_N] = (onehot_N - slope_N * logprob_N.exp()).to(probs_CV.dtype)
    return probs_CV
