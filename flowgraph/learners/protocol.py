"""What every learner does, and the values that cross its door. Imports no torch.

A learner is the only holder of the trainer owner's large mutable state: parameters and optimiser.
It knows rows of tokens, forward passes and gradients; it knows no reward, advantage or loss: the loss is a
function handed to it.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Rows(NamedTuple):
    """Packed rows (leaves) of one training batch; row i is tokens[offsets[i]:offsets[i+1]].

    tokens: i32[token] (the packed dim), prompt then response of each row
    offsets: i64[leaf+1]
    mask: bool[token], true where the token was sampled and is trained on
    fields: name → array[token], what the loss reads besides (advantages, rollout log-probabilities…)
    side: name → integers[token, layer, k], what the engine chose in every layer for each token (`Side`)
    recorded: bool[token], where it did; elsewhere `side` says nothing. None without side channels
    trajectory: i64[leaf], the trajectory that each row is a leaf of; None: each row is its own
    """

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    fields: Mapping[str, npt.NDArray[Any]]
    side: Mapping[str, npt.NDArray[np.integer[Any]]] = MappingProxyType({})
    recorded: npt.NDArray[np.bool_] | None = None
    trajectory: npt.NDArray[np.int64] | None = None


class Tokens(NamedTuple):
    """What a loss sees of n masked tokens, in any order, as torch tensors.

    logprobs, entropy: f32[n], both with a graph: of the token, and of the distribution that it was drawn from
    fields: name → [n], see `Rows.fields`
    sequence: i64[n] in 0..sequences-1, the trajectory that each token is of
    values: f32[n] with a graph, of a `Critic`, whose log-probabilities and entropy say nothing; None of any other
    """

    logprobs: Any
    entropy: Any
    fields: Mapping[str, Any]
    sequence: Any
    sequences: int
    values: Any | None = None


class Losses(NamedTuple):
    """What a loss says of them.

    loss: f32[n]; the learner adds it up and divides (see `Aggregation`)
    metrics: name → f32[n] without a graph, averaged over all masked tokens of the batch; no name of the learner's own
        metrics (loss, entropy, tokens, …)
    kept: bool[n], false where the loss leaves a token out: it counts in no sum and in no denominator of the loss.
        None: all are kept
    spread: name → f32[n], metrics of which besides the mean (NAME) NAME_p05, NAME_p50, NAME_p95 and NAME_max are told
    """

    loss: Any
    metrics: Mapping[str, Any] = MappingProxyType({})
    kept: Any | None = None
    spread: Mapping[str, Any] = MappingProxyType({})


# Element-wise over tokens, unless it is marked by `token_loss`: then a batch is many calls, each on any tokens.
TokenLoss = Callable[[Tokens], Losses]


def token_loss(
    *,
    whole: bool = False,
    masks: bool = False,
    values: bool = False,
    reads: Sequence[str] = (),
    before: bool = True,
) -> Callable[[TokenLoss], TokenLoss]:
    """Mark a loss with what it is. One without a mark looks at each token alone, and keeps it.

    whole: it looks across the tokens of a sequence, so that it gets all of them in one call (the logits of a whole
        micro-batch then exist at once: positions · vocabulary)
    masks: it may leave tokens out (`Losses.kept`)
    values: it reads `Tokens.values`, and no log-probabilities: a loss for a `Critic`, and for no other learner
    reads: inputs of the train hop that it can't do without; they are then no longer optional
    before: it compares with the learner before the batch's first step, so that with several steps the batch is scored
    """

    def mark(loss: TokenLoss) -> TokenLoss:
        marks = {"whole": whole, "masks": masks, "values": values, "reads": tuple(reads), "before": before}
        loss.__dict__.update(marks)
        return loss

    return mark


# How the losses ℓ of the tokens that are kept become one number. N: their number; S: sequences with one at least;
# n_i: how many sequence i has. All are of the whole batch, over ranks and micro-batches. A sequence is a trajectory.
#   token-mean               Σ ℓ / N                      every token weighs the same
#   seq-mean-token-mean      Σ_i (Σ_t ℓ / n_i) / S        every sequence weighs the same
#   seq-mean-token-sum       Σ_i Σ_t ℓ / S
#   seq-mean-token-sum-norm  Σ_i Σ_t ℓ / (S · length)     with a fixed length (Dr. GRPO, arXiv 2503.20783)
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def check_aggregation(mode: str, length: int | None) -> None:
    """Raises ValueError for a mode that is none, and for a length where it says nothing or is missing."""
    modes = typing.get_args(Aggregation)
    if mode not in modes:
        raise ValueError(f"aggregate must be one of {', '.join(modes)}, not {mode!r}")
    if mode == "seq-mean-token-sum-norm":
        if length is None or length <= 0:
            raise ValueError(f"aggregate {mode} divides by a fixed length; give length a number above 0")
    elif length is not None:
        raise ValueError(f"length says nothing with aggregate {mode}; leave it out")


class Learner(Protocol):
    def step(
        self,
        rows: Rows,
        loss: TokenLoss,
        *,
        aggregate: Aggregation = "token-mean",
        length: int | None = None,
        replay: bool = True,
    ) -> dict[str, float]:
        """One optimiser step on one batch: forward, backward, clip once, update. Returns metrics:
        loss, grad_norm (before clipping), lr, entropy, tokens (masked), rows (with a masked token), skipped,
        and those of the loss. A batch of which the loss keeps no token takes no step and says so with skipped=1.

        aggregate, length: how the loss is added up and divided; by numbers of the whole batch, so that loss and
        gradient are the same for any split of its rows.

        With the side channels `routed_experts` and `indexer_topk` the forward takes the experts, and attends to the
        positions, that are recorded, and its own choice where none is; the gradient flows through the weights that the
        router gives those experts now. Without `replay` it always takes its own. Metrics either way: recorded, the
        share of computed tokens that were recorded, and routing_mismatch and indexer_mismatch, the share of these, in
        all layers that choose, for which it executed another set.

        Raises ValueError naming the row for a row without a prompt token before its first masked token, an
        unordered offset, a shape mismatch, a token outside the vocabulary, a row longer than the model's
        context, a field that is not finite where the mask is true, trajectories that are not one integer a row, or a
        side channel that it can't replay; FloatingPointError for a loss or a gradient that is not finite. In both cases
        no parameter has changed.
        """
        ...

    def minibatches(self, rows: Rows, count: int) -> list[Rows]:
        """The rows of each of `count` parts of the batch: whole trajectories in its order, about as many in each.

        Of several processes each gives its own rows, and gets what it has of each part, which may be nothing: the parts
        are those of one process.
        """
        ...

    def logprobs(self, rows: Rows, *, replay: bool = True) -> npt.NDArray[np.float32]:
        """f32[token]: the log-probability of each token given those before it; 0 where mask is false.

        Side channels are replayed as in `step`.
        """
        ...

    def weights(self) -> dict[str, Any]:
        """Names as in the model's files → CPU tensors, tied ones once; in its own dtype views, until the next step."""
        ...

    def save(self, directory: str) -> None:
        """Write a Hugging Face model directory (safetensors, config, tokenizer), atomically."""
        ...

    def close(self) -> None: ...


class Critic(Protocol):
    """A learner of which the output is one number a token: what it expects of the rest, before the token is sampled."""

    def values(self, rows: Rows) -> npt.NDArray[np.float32]:
        """f32[token]: the value of each masked token, read where its log-probability would be; 0 elsewhere."""
        ...

    def step(
        self,
        rows: Rows,
        loss: TokenLoss,
        *,
        aggregate: Aggregation = "token-mean",
        length: int | None = None,
    ) -> dict[str, float]:
        """As `Learner.step`, for a loss that is marked `values`; there is no entropy."""
        ...

    def save(self, directory: str) -> None:
        """Write a Hugging Face directory of a model for token classification with one label."""
        ...

    def close(self) -> None: ...
