"""What every learner does, and the values that cross its door. Imports no torch.

A learner is the only holder of the trainer owner's large mutable state: parameters and optimiser.
It knows rows of tokens, forward passes and gradients; it knows no reward, advantage or loss: the loss is a
function handed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Rows(NamedTuple):
    """Packed rows (leaves) of one training batch; `token` is the packed dim, row i is tokens[offsets[i]:offsets[i+1]].

    tokens: i32[token], prompt then response of each row
    offsets: i64[leaf+1]
    mask: bool[token], true where the token was sampled and is trained on
    fields: name → array[token], what the loss reads besides (advantages, rollout log-probabilities…)
    """

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    fields: Mapping[str, npt.NDArray[Any]]


# (logprobs f32[n], entropy f32[n], fields: name → tensor[n]) → (loss f32[n], metrics: name → f32[n]).
# n counts masked tokens only. Element-wise over tokens, so the learner may split rows as it likes; it sums the
# loss and divides by the global number of masked tokens, and averages each metric over the same tokens.
TokenLoss = Callable[[Any, Any, Mapping[str, Any]], tuple[Any, Mapping[str, Any]]]


class Learner(Protocol):
    def step(self, rows: Rows, loss: TokenLoss) -> dict[str, float]:
        """One optimiser step on one batch: forward, backward, clip once, update. Returns metrics:
        loss, grad_norm, lr, entropy, tokens (masked), rows, and those of the loss. A batch whose mask is all false takes
        no step and says so with skipped=1.

        Raises ValueError naming the row for a row without a prompt token before its first masked token, an
        unordered offset, a shape mismatch or a non-finite field.
        """
        ...

    def logprobs(self, rows: Rows) -> npt.NDArray[np.float32]:
        """f32[token]: the log-probability of each token given those before it; 0 where mask is false."""
        ...

    def weights(self) -> dict[str, Any]:
        """Hugging Face names → CPU tensors in the model's dtype, tied tensors once; views, valid until the next step."""
        ...

    def save(self, directory: str) -> None:
        """Write a Hugging Face model directory (safetensors, config, tokenizer), atomically."""
        ...

    def close(self) -> None: ...
