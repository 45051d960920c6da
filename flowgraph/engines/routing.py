"""Choices in the `transformers` engine: experts whose bits depend on no neighbour, and what is executed is recorded.

transformers' own choice of kernel groups the tokens of an expert, and the bits of a token's output then vary with how
many they are. Here each token's experts are gathered, and multiplied with it alone.

Shapes: T tokens of a forward, D hidden size, K experts of a token; L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from flowgraph.engines.protocol import Side
from flowgraph.models.choices import Captured, Choices
from flowgraph.models.positions import Positions

GATHERED = 1 << 26  # bytes of expert weights that are gathered at once
Rows = npt.NDArray[np.unsignedinteger[Any]]


def slot_experts(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Experts for transformers: those of a few tokens at a time, because what a token gathers are whole matrices."""
    a_token = chosen_TK.shape[1] * max(p[0].nbytes for p in experts.parameters())
    parts = (torch.split(t, max(1, GATHERED // a_token)) for t in (hidden_TD, chosen_TK, weights_TK))
    done = [batched_mm_experts_forward(experts, *part) for part in zip(*parts, strict=True)]
    return done[0] if len(done) == 1 else torch.cat(done)


ExpertsInterface.register("flowgraph_slots", slot_experts)


class Recorder(Protocol):
    """What is recorded of every token in one side channel."""

    def capture(self) -> AbstractContextManager[Captured]:
        """See `Choices.capture`."""
        ...

    def rows(self, captured: Captured, own_BS: Tensor) -> Rows:
        """[T, L, K] of what was captured, at the smallest dtype. own_BS: the tokens' positions, in B lines"""
        ...

    def empty(self, tokens: int) -> Rows: ...


class Experts:
    """The experts that a model executes: u8 for at most 256 of them, else u16.

    Raises ModelError for a model whose experts can't be read.
    """

    def __init__(self, model: Any, context: int) -> None:
        self._choices = Choices(model)
        self._dtype = np.uint8 if self._choices.experts <= 256 else np.uint16

    def capture(self) -> AbstractContextManager[Captured]:
        return self._choices.capture()

    def rows(self, captured: Captured, own_BS: Tensor) -> Rows:
        rows: Rows = captured.indices.numpy().astype(self._dtype)
        return rows

    def empty(self, tokens: int) -> Rows:
        return np.zeros((tokens, self._choices.layers, self._choices.top_k), self._dtype)


class Indexers:
    """The positions that a model's indexers let each token attend to. One that has fewer than K repeats its own.

    Raises ModelError for a model whose indexers can't be read. context: of a request, in tokens
    """

    def __init__(self, model: Any, context: int) -> None:
        self._positions = Positions(model)
        self._dtype = np.min_scalar_type(context - 1)

    def capture(self) -> AbstractContextManager[Captured]:
        return self._positions.capture()

    def rows(self, captured: Captured, own_BS: Tensor) -> Rows:
        lines, length = own_BS.shape
        own_T11 = own_BS.reshape(-1, 1, 1).numpy()
        starts_T11 = np.repeat(np.arange(lines) * length, length)[:, None, None]
        found_TLK = captured.indices.numpy() - starts_T11
        rows = np.empty((*found_TLK.shape[:2], self._positions.top_k), self._dtype)
        rows[:] = own_T11
        rows[..., : found_TLK.shape[2]] = np.minimum(
            found_TLK, own_T11
        )  # what lies behind a token is no choice
        return rows

    def empty(self, tokens: int) -> Rows:
        return np.zeros((tokens, self._positions.layers, self._positions.top_k), self._dtype)


RECORDERS: dict[str, Callable[[Any, int], Recorder]] = {"routed_experts": Experts, "indexer_topk": Indexers}


class Recording:
    """What one request recorded in one side channel: a row for each token that was computed.

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
