"""Counter-based random numbers, and the choice of one token per row.

A random number is a function of (key, position) alone, so a request draws the same numbers in whatever
batch, slot, process or machine it runs. Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

KEY_LIMIT = 1 << 64


def uniform(key: int, position: int) -> float:
    """The number in [0, 1) with 53 random bits that belongs to a key and a position, both in [0, 2**64)."""
    digest = blake2b(struct.pack("<QQ", key, position), digest_size=8, person=b"flowgraph.draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """Draws one token per row by inverting the cumulative distribution.

    It keeps its work space for at most `rows` rows: fresh pages would cost more than the arithmetic.
    """

    def __init__(self, rows: int, vocabulary: int) -> None:
        self._work_SV = torch.empty(rows, vocabulary, dtype=torch.float32)

    def __call__(
        self, logits_SV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """Returns the S tokens and their log-probabilities; uniforms: a number in [0, 1) per row.

        The arithmetic is fp32. A log-probability is that of the distribution scaled by the row's
        temperature; a row with temperature 0 takes the largest logit and gets the unscaled one. A row
        whose logits hold a NaN or +inf gets the log-probability NaN and a meaningless token.
        """
        tiny = torch.finfo(torch.float32).tiny
        divisors_S1 = torch.tensor([[max(t, tiny) if t else 1.0] for t in temperatures], dtype=torch.float32)
        work_SV = self._work_SV[: len(logits_SV)].copy_(logits_SV)
        largest_S1 = work_SV.amax(dim=1, keepdim=True)
        # The largest becomes 0 before the division, so that no temperature is too small.
        work_SV.sub_(largest_S1)
        if any(t not in (0, 1) for t in temperatures):
            work_SV.div_(divisors_S1)
        cumulative_SV = work_SV.exp_().cumsum_(dim=1)
        total_S1 = cumulative_SV[:, -1:].clone()
        # The sought value stays below the total, and the first entry above it belongs to a token that made
        # the sum grow: never one of probability 0.
        sought_S1 = (torch.tensor(uniforms, dtype=torch.float64)[:, None] * total_S1).float()
        sought_S1 = torch.minimum(sought_S1, torch.nextafter(total_S1, torch.zeros_like(total_S1)))
        tokens_S1 = torch.searchsorted(cumulative_SV, sought_S1, right=True)
        tokens_S1.clamp_(max=work_SV.shape[1] - 1)  # only a row of NaN gets there
        greedy = [row for row, t in enumerate(temperatures) if t == 0]
        if greedy:
            tokens_S1[greedy] = logits_SV[greedy].float().max(dim=1, keepdim=True).indices
        chosen_S1 = logits_SV.gather(1, tokens_S1).float()
        logprobs_S1 = (chosen_S1 - largest_S1) / divisors_S1 - total_S1.log()
        return tokens_S1[:, 0].tolist(), logprobs_S1[:, 0].tolist()
