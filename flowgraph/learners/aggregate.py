"""Aggregation: which number the losses of a batch's tokens become. The formulas stand at `Aggregation`.

What a rank or a micro-batch can know alone is a factor of its tokens; what only the batch knows is one divisor, and
it comes last. So gradients are added up before anything is divided, and no split of the batch changes them.
"""

from __future__ import annotations

from typing import Any

from .protocol import Aggregation


def needs_counts(mode: Aggregation) -> bool:
    """Whether a token's factor is known only when all tokens of its sequence are."""
    return mode == "seq-mean-token-mean"


def counts_sequences(mode: Aggregation) -> bool:
    """Whether the divisor has a number of sequences, each counted where its tokens are: all in one micro-batch."""
    return mode != "token-mean"


def factors(mode: Aggregation, counts: Any, sequence: Any) -> Any:
    """What multiplies each token's loss: f[n], or 1. counts: f[m], how many tokens of each sequence are kept."""
    return 1.0 / counts.clamp(min=1)[sequence] if needs_counts(mode) else 1.0


def divisor(mode: Aggregation, length: int | None, tokens: float, sequences: float) -> float:
    """What divides the sum at the end; 0 where nothing is kept. tokens, sequences: kept, of the whole batch."""
    if mode == "token-mean":
        return tokens
    return sequences * (length or 1)
