"""toy.sample with its outputs in place, as it is meant and in other ways that a user may find."""

from __future__ import annotations

from typing import Any

from jaxtyping import Int32, UInt64

from flowgraph import Array, hop, outputs
from tests.runtime import toy

WAYS = ("whole", "some", "turned", "shorter", "longer", "twice")


@hop(owner="rollout", lifetime="consumed")
async def sample(
    prompt: Int32[Array, "prompt"], key: UInt64[Array, ""], *, jitter: float = 0.0, how: str = "whole"
) -> toy.Sampled:
    """What toy.sample gives.

    how: whole, every array in its place; some, tokens in memory of their own; turned, a view of them backwards;
    shorter and longer, asked for with other sizes; twice, those that it got the second time
    """
    given: dict[str, Any] = (await toy.sample(prompt, key, jitter=jitter))._asdict()
    token, leaf = len(given["tokens"]), len(given["leaf_offsets"]) - 1
    out = outputs(sample, token=token + {"shorter": -1, "longer": 1}.get(how, 0), leaf=leaf)
    if how == "twice":
        out["tokens"][:] = -1
        out = outputs(sample, token=token, leaf=leaf)
    if how == "shorter":
        out["tokens"][:] = -1
    elif how == "longer":
        out["tokens"][:token] = given["tokens"]
        given["tokens"] = out["tokens"][:token]
    elif how == "turned":
        out["tokens"][:] = given["tokens"][::-1]
        given["tokens"] = out["tokens"][::-1]
    else:
        for name in out.keys() - ({"tokens"} if how == "some" else set()):
            out[name][...] = given[name]
            given[name] = out[name]
    return toy.Sampled(**given)
