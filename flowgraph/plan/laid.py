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
    too. Where a group does not fit into one micro-batch, or is cut between ranks, its prompt is laid once more.
    """
    values = dim_values("step", dims, "mean")
    prompt = size_of("prompt", dims, "mean", 0)
    packed = max(0.0, values["token"] - values["leaf"])
    groups, rows = values["group"], values["leaf"]
    if not groups or not prompt:
        return packed, packed
    alone = (packed - rows * prompt) / groups  # of a group, without its prompt
    parts = math.ceil(alone / (max_tokens - prompt)) if max_tokens > prompt else rows / groups
    laid = groups * (max(1.0, parts) * prompt + alone) + (ranks - 1) * prompt
    return min(packed, laid), packed
