"""A hop that fingerprints what crosses the seams of a step, bit for bit, into metrics.jsonl."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, NamedTuple

from jaxtyping import Bool, Float32, Int32

from flowgraph import Array, Scalars, hop


class Fingerprint(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


def bits(array: Any) -> float:
    """52 bits of a hash of the bytes, which a float holds exactly."""
    return float(int.from_bytes(hashlib.sha256(array.tobytes()).digest()[:8], "little") >> 12)


@hop(owner="driver")
def fingerprint(
    tokens: Int32[Array, "token"],
    logprobs: Float32[Array, "token"],
    response_mask: Bool[Array, "token"],
    score: Float32[Array, "leaf"],
    advantages: Float32[Array, "token"],
) -> Fingerprint:
    names = {
        "tokens": tokens,
        "logprobs": logprobs,
        "mask": response_mask,
        "score": score,
        "advantages": advantages,
    }
    return Fingerprint({name: bits(array) for name, array in names.items()} | {"n": float(len(tokens))})
