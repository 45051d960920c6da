"""What every engine does, and the values that cross its door. Imports no torch.

An engine is the only holder of the rollout owner's large mutable state: weights and KV cache.
It keeps no meaning across steps: given (weights of a version, prompt ids, sampling, key) it returns
the same tokens whatever else it is doing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample one response.

    temperature: 0 means greedy. Log-probabilities are those of the temperature-scaled distribution.
    stop: strings; generation ends with the token that completes one (the token is kept: ids are the truth).
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, not {self.temperature}")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")


class Generation(msgspec.Struct, frozen=True):
    """One sampled response of r tokens; the three arrays have the same length r (0 after an early abort)."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason


class EngineLoad(msgspec.Struct, frozen=True):
    """Requests being decoded, requests waiting for a slot, and the number of slots."""

    running: int
    waiting: int
    slots: int


class Engine(Protocol):
    """Generate with token ids in and out; weights replaced in place. All waits are the caller's to bound."""

    @property
    def version(self) -> int:
        """The version of the weights that the next token is sampled from."""
        ...

    async def generate(
        self, prompt: npt.NDArray[np.int32], sampling: Sampling, *, key: int, rid: str
    ) -> Generation:
        """Sample one response. `key` (64 bits) alone decides the randomness; position is the counter.

        Raises ValueError for an empty prompt, or one that with max_new_tokens exceeds the context.
        """
        ...

    def abort(self, rid: str) -> bool:
        """End a request now; its `generate` returns what it has, with reason "abort". False if unknown."""
        ...

    async def pause(self) -> None:
        """Return when no token is being computed; requests keep their slots and wait."""
        ...

    async def resume(self) -> None:
        """Decode again. Harmless when not paused."""
        ...

    def update_weights(self, tensors: Mapping[str, Any], version: int) -> None:
        """Copy every tensor into the model (paused engine only) and drop all cached prefixes.

        tensors: Hugging Face names → tensors on the CPU. A name that is missing, unknown, or of another
        shape or dtype is a ValueError naming it, and then no weight has changed. A tied head is no
        missing weight. `version` becomes current only after the last tensor has landed.
        """
        ...

    def load(self) -> EngineLoad: ...

    def close(self) -> None:
        """Abort everything and free the model. Harmless when repeated."""
        ...
