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
    side = {name: _without(one, past) for name, one in whole.side.items()}
    return Generation(
        whole.ids[:end], whole.logprobs[:end], whole.versions[:end], "stop", whole.retractions, side
    )


def _without(side: Side, past: int) -> Side:
    kept = len(side.recorded) - past
    return Side(side.values[:kept], side.recorded[:kept])


def ended(whole: Generation, reason: FinishReason) -> Generation:
    return msgspec.structs.replace(whole, finish_reason=reason)


def with_budget(sampling: Sampling, tokens: int) -> Sampling:
    return msgspec.structs.replace(sampling, max_new_tokens=tokens)
