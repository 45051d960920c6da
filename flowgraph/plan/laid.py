"""What a forward pass of a learner lays down: positions a step, where rows share what they begin with and where not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from flowgraph.passes.sizes import dim_values, size_of
from flowgraph.plan.plan import Plan
from flowgraph.spec.dims import Size


class Laid(msgspec.Struct, frozen=True):
    """Mean positions a step that an owner's learner computes as a tree, and that it would with `pack: packed`."""

    owner: str
    tree: float
    packed: float

    @property
    def text(self) -> str:
        of = f"{self.tree:,.0f} of {self.packed:,.0f}"
        return (
            f"pack: tree of {self.owner} lays at most {of} mean tokens a step ({self.tree / self.packed:.2f})"
        )


def laid(plan: Plan) -> Iterator[Laid]:
    """Of every learner with `pack: tree` that gets whole steps, in a graph that sizes its prompts."""
    for name, owner in plan.owners.items():
        steps = [
            h for h in plan.hops.values() if h.owner == name and h.uses == "learner" and h.rows == "step"
        ]
        if steps and owner.learner is not None and owner.learner.pack == "tree":
            ranks = math.prod(owner.ranks.values())
            tree, packed = positions(plan.dims, owner.learner.max_tokens, ranks)
            if packed:
                yield Laid(name, tree, packed)


def positions(dims: Mapping[str, Size], max_tokens: int, ranks: int = 1) -> tuple[float, float]:
    """(tree, packed): mean positions a step. A row's last token is predicted and not computed.

    All rows of a group begin with its prompt, which is what is known of them; they may have more in common, and groups
    too. Where a micro-batch or a rank is full inside a group, the next begins with the prompt again.
    """
    values = dim_values("step", dims, "mean")
    prompt = size_of("prompt", dims, "mean", 0)
    packed = max(0.0, values["token"] - values["leaf"])
    if not values["group"] or not prompt:
        return packed, packed
    again = values["leaf"] - values["group"]
    once = packed - again * prompt
    cuts = max(math.ceil(once / max_tokens), ranks) - 1
    return min(packed, once + cuts * prompt * again / values["leaf"]), packed
