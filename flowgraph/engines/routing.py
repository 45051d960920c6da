"""Experts in the `transformers` engine: their bits depend on no neighbour, and what is executed is recorded.

transformers' own choice of kernel groups the tokens of an expert, and the bits of a token's output then vary with how
many they are. Here each token's experts are gathered, and multiplied with it alone.

Shapes: T tokens of a forward, D hidden size, K experts of a token; L layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from flowgraph.engines.protocol import Side
from flowgraph.models.choices import Choices

GATHERED = 1 << 26  # bytes of expert weights that are gathered at once
Rows = npt.NDArray[np.unsignedinteger[Any]]


def slot_experts(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Experts for transformers: those of a few tokens at a time, because what a token gathers are whole matrices."""
    a_token = chosen_TK.shape[1] * max(p[0].nbytes for p in experts.parameters())
    parts = (torch.split(t, max(1, GATHERED // a_token)) for t in (hidden_TD, chosen_TK, weights_TK))
    done = [batched_mm_experts_forward(experts, *part) for part in zip(*parts, strict=True)]
    return done[0] if len(done) == 1 else torch.cat(done)


ExpertsInterface.register("flowgraph_slots", slot_experts)


class Router:
    """The experts that a model executes, at the smallest dtype: u8 for at most 256 of them, else u16.

    Raises ModelError for a model whose experts can't be read.
    """

    def __init__(self, model: Any) -> None:
        self._choices = Choices(model)
        self._dtype = np.uint8 if self._choices.experts <= 256 else np.uint16

    def capture(self) -> Any:
        """See `Choices.capture`."""
        return self._choices.capture()

    def rows(self, captured: Any) -> Rows:
        """[T, L, K] of what was captured."""
        rows: Rows = captured.indices.numpy().astype(self._dtype)
        return rows

    def empty(self, tokens: int) -> Rows:
        return np.zeros((tokens, self._choices.layers, self._choices.top_k), self._dtype)


class Routing:
    """What one request recorded: a row for each token that was computed.

    Its prompt's rows are those of the prefix, which its siblings share; sampled: memory for all others that it may come
    to have. start: rows of the tokens before it are known to whoever asks, and are left out
    """

    def __init__(self, sampled: Rows, start: int) -> None:
        self._prompt: Rows | None = None
        self._sampled, self._start = sampled, start
        self._filled = 0  # of those sampled

    def take(self, first: int, rows: Rows) -> None:
        """Of the tokens from `first` on; the prompt's come first, and together. Those that are there stay: after a
        retraction all are computed anew, maybe by other weights than the tokens were sampled under.
        """
        if self._prompt is None:
            assert first == 0, "a prompt's rows come first"
            self._prompt = rows
            return
        first, end = first - len(self._prompt), first - len(self._prompt) + len(rows)
        if end > self._filled:
            assert first <= self._filled, "rows follow each other"
            self._sampled[self._filled : end] = rows[self._filled - first :]
            self._filled = end

    def side(self, tokens: int) -> Side:
        """Of the request's first `tokens` tokens, prompt and response; the last one was never computed."""
        assert self._prompt is not None, "a token was sampled, so its prompt was computed"
        prompt = len(self._prompt)
        recorded = np.zeros(tokens, np.bool_)
        recorded[self._start : prompt + self._filled] = True
        known = np.broadcast_to(
            self._sampled[:0].sum(dtype=self._sampled.dtype), (self._start, *self._prompt.shape[1:])
        )
        parts = known, self._prompt[self._start :], self._sampled[: tokens - prompt]
        return Side(parts, recorded, self._sampled.dtype)
