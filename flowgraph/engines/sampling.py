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


def sample(
    logits_SV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draw one token per row by inverting the cumulative distribution; returns tokens and log-probabilities.

    logits_SV: any float dtype; the arithmetic is fp32. A log-probability is that of the distribution scaled
    by the row's temperature; a row with temperature 0 takes the largest logit and gets the unscaled one.
    A row whose logits hold a NaN or +inf gets the log-probability NaN and a meaningless token.
    """
    assert len(logits_SV) == len(temperatures) == len(uniforms)
    tiny = torch.finfo(torch.float32).tiny
    divisors_S = torch.tensor([max(t, tiny) if t else 1.0 for t in temperatures], dtype=torch.float32)
    scaled_SV = logits_SV.float()
    # The largest becomes 0 before the division, so that no temperature is too small.
    scaled_SV = (scaled_SV - scaled_SV.amax(dim=1, keepdim=True)).div_(divisors_S[:, None])
    cumulative_SV = scaled_SV.exp().cumsum(dim=1)
    total_S = cumulative_SV[:, -1].contiguous()
    # The sought value stays below the total, and the first entry above it belongs to a token that made the
    # sum grow: never one of probability 0.
    sought_S = (torch.tensor(uniforms, dtype=torch.float64) * total_S).float()
    sought_S = torch.minimum(sought_S, torch.nextafter(total_S, torch.zeros_like(total_S)))
    tokens_S = torch.searchsorted(cumulative_SV, sought_S[:, None], right=True)[:, 0]
    tokens_S.clamp_(max=logits_SV.shape[1] - 1)  # only a row of NaN gets there
    if 0 in temperatures:
        greedy_S = torch.tensor([t == 0 for t in temperatures])
        tokens_S = torch.where(greedy_S, logits_SV.argmax(dim=1), tokens_S)
    logprobs_S = scaled_SV.gather(1, tokens_S[:, None])[:, 0] - total_S.log()
    return tokens_S.tolist(), logprobs_S.tolist()
