"""What every learner does, and the values that cross its door. Imports no torch.

A learner is the only holder of the trainer owner's large mutable state: parameters and optimiser.
It knows rows of tokens, forward passes and gradients; it knows no reward, advantage or loss: the loss is a
function handed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

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


# (logprobs f32[n], entropy f32[n], fields: name → tensor[n]) → (loss f32[n], metrics: name → f32[n]).
# n counts masked tokens only, in any order. Element-wise over tokens: the learner calls it once or many times
# a batch, with as many tokens as it likes; it sums the loss, divides by the global number of masked tokens,
# and averages each metric over the same tokens. Entropy comes without a graph: to report, not to train on.
TokenLoss = Callable[[Any, Any, Mapping[str, Any]], tuple[Any, Mapping[str, Any]]]


class Learner(Protocol):
    def step(self, rows: Rows, loss: TokenLoss, *, replay: bool = True) -> dict[str, float]:
        """One optimiser step on one batch: forward, backward, clip once, update. Returns metrics:
        loss, grad_norm (before clipping), lr, entropy, tokens (masked), rows (with a masked token), skipped,
        and those of the loss. A batch whose mask is all false takes no step and says so with skipped=1.

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
