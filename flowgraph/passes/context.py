"""How many tokens a row may have, against the positions that a model was made for."""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.errors import Diagnostic
from flowgraph.ir.graph import Graph
from flowgraph.models import facts


def too_long(graph: Graph) -> Iterator[tuple[str, Diagnostic]]:
    """(owner, FG114): a row of its engine or learner may outgrow the model, which would end a run in its midst.

    Priced it can be: what it would cost with a longer context is asked often.
    """
    dims = graph.dims
    if not {"prompt", "response"} <= set(dims):
        return
    longest = dims["token"].max if "token" in dims else dims["prompt"].max + dims["response"].max
    for name, owner in graph.owners.items():
        model = facts(owner.model) if owner.model else None
        if model is not None and 0 < model.max_position < longest:
            most = f"{model.max_position:,}"
            message = (
                f"owner {name} may get a row of {longest:,} tokens, and {owner.model} has {most} positions"
            )
            help = f"lower dims.prompt or dims.response, to {most} tokens together"
            yield name, Diagnostic("FG114", graph.file.owners[name].place, message, help)
