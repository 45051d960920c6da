"""Small rings by hand, of the same hops as those that are drawn at random."""

from __future__ import annotations

from typing import Any

from flowgraph import TiledOver
from flowgraph.spec.dims import Size
from flowgraph.spec.types import Fact
from tests.graphs.content import MASK, Col
from tests.graphs.random_graphs import REQUEST, STEP
from tests.graphs.rings import Made, Ring, Take

TOKENS = Col("tokens", "array", "token", "int32")
VALID = Col("valid", "array", "token", "bool", (MASK,))
BOUNDS = Col("bounds", "array", "leaf+1", "int64")
PROMPT = Col("prompt", "array", "prompt", "int32")
TRUTH = Col("truth", "json", "", max=100)


def tokens(name: str, *facts: Fact, dtype: str = "float32") -> Col:
    return Col(name, "array", "token", dtype, facts)


TILED = tokens("tiled", TiledOver("leaf", "bounds", "valid"))


def one(name: str, reads: str, *gives: Col, **more: Any) -> Made:
    """A hop of the trainer on steps. more: its other fields.

    reads: `hop.column`, or `hop.column@leaf` for one value a leaf, separated by spaces; gives: what it makes of them
    """
    takes: list[Take] = []
    for text in reads.split():
        ref, _, shape = text.partition("@")
        via, column = ref.split(".")
        port = column if all(t.port != column for t in takes) else f"{column}_again"
        takes.append(Take(port, via, Col(column, "array", ""), shape))
    fixed = {"rows": "step", "takes": tuple(takes), "gives": gives, "owner": "trainer"}
    return Made(name, **fixed | more)


def sampler(*gives: Col, **more: Any) -> Made:
    return one(
        "sampler",
        "dispatch.key",
        *gives,
        **{"rows": "trajectory", "role": "sampler", "owner": "rollout"} | more,
    )


def small(*hops: Made, source: tuple[Col, ...] = (PROMPT,), full: bool = True, **dims: int) -> Ring:
    """The hops, after a source and before a sync. The last one on trajectories feeds the buffer.

    dims: sizes that are not 2
    """
    made = (
        Made("dataset", "group", gives=source, role="source"),
        *hops,
        one("sync", "batch.batch_id", role="sync"),
    )
    known = {c.name: (c, h.rows) for h in made for c in h.gives}
    known |= {c.name: (c, "trajectory") for c in REQUEST} | {c.name: (c, "step") for c in STEP}
    bound = [h._replace(takes=tuple(_bound(t, h, *known[t.column.name]) for t in h.takes)) for h in made]
    sizes = {"group": 2, "sample": 2, "leaf": 2, "prompt": 2, "response": 2} | dims
    tail = [h.name for h in made if h.rows == "trajectory"][-1]
    return Ring({name: Size(size, size) for name, size in sizes.items()}, tuple(bound), tail, full)


def _bound(take: Take, reader: Made, column: Col, rows: str) -> Take:
    each = reader.rows == "step" and rows != "step" and not column.shape
    shape = take.shape or ("trajectory" if each else column.shape)
    return take._replace(column=column, shape=shape, mask=MASK in column.facts)
