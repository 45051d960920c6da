"""A response in segments: what an abort leaves is the prefix of what follows."""

from __future__ import annotations

import msgspec
import numpy as np

from flowgraph.engines.protocol import FinishReason, Generation, Sampling, Side
from flowgraph.engines.served.side import joined as joined_side


def joined(first: Generation, second: Generation, rid: str) -> Generation:
    """Two segments of one response; what ended the second ends both."""
    if not len(first.ids):
        return second
    side = {
        name: joined_side(one, second.side[name], rid=rid) if name in second.side else one
        for name, one in first.side.items()
    }
    return Generation(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.logprobs, second.logprobs]),
        np.concatenate([first.versions, second.versions]),
        second.finish_reason,
        first.retractions + second.retractions,
        side,
    )


def cut(whole: Generation, end: int) -> Generation:
    """Its first `end` tokens, of which the last completes a stop string."""
    past = len(whole.ids) - end
    side = {name: one.rows(0, len(one.recorded) - past) for name, one in whole.side.items()}
    return Generation(
        whole.ids[:end], whole.logprobs[:end], whole.versions[:end], "stop", whole.retractions, side
    )


def narrowed(first: Generation) -> Generation:
    """The same, whose side channels take no more memory than they need: it waits for the next segment."""
    side = {name: Side((one.values,), one.recorded, one.dtype) for name, one in first.side.items()}
    return msgspec.structs.replace(first, side=side)


def ended(whole: Generation, reason: FinishReason) -> Generation:
    return msgspec.structs.replace(whole, finish_reason=reason)


def with_budget(sampling: Sampling, tokens: int) -> Sampling:
    return msgspec.structs.replace(sampling, max_new_tokens=tokens)
