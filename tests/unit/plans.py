"""Plans of any shape, built by hand, for tests of what is drawn and audited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flowgraph.engines.registry import TransformersOptions
from flowgraph.errors import Place
from flowgraph.learners.registry import TorchOptions
from flowgraph.plan.plan import Column, Hop, Owner, Plan, Read, Seam, SeamField, Watch
from flowgraph.spec.dims import Size
from flowgraph.spec.form import RunDecl

PLACE = Place("graph.yaml", 1, 1)
OWNERS = {
    "driver": Owner("driver", 1, 1, 0, ("driver",)),
    "rollout": Owner("rollout", 1, 1, 0, ("rollout",), engine=TransformersOptions("smollm2-135m")),
    "trainer": Owner("trainer", 1, 1, 0, ("trainer",), learner=TorchOptions("smollm2-135m", 1e-5)),
}


def field(
    producer: str,
    port: str = "x",
    mean: float = 100,
    most: int = 200,
    type: str = "i32[token]",
    priced: bool = True,
) -> SeamField:
    return SeamField(port, producer, port, type, (), mean, most, priced)


def seam(source: str, reader: str, *fields: SeamField, control: Sequence[str] = (), **more: object) -> Seam:
    transport = "shared memory" if fields else "control"
    return Seam(source, reader, transport, "consumed", tuple(fields), tuple(control), **more)  # type: ignore[arg-type]


def plan(
    seams: Iterable[Seam],
    names: Iterable[str] = (),
    *,
    owners: Sequence[str] = ("driver",),
    folds: Iterable[str] = (),
    graph: str = "test",
    doc: str = "a graph for a test",
    dims: dict[str, Size] | None = None,
) -> Plan:
    """A plan whose hops are those that its seams name. owners: dealt out in turn.

    Control seams hand on rows, those of ports that begin with `_` only values.
    """
    made = tuple(seams)
    hops = list(dict.fromkeys([*names, *(name for s in made for name in (s.source, s.reader))]))
    home = {name: owners[i % len(owners)] for i, name in enumerate(hops)}
    made = tuple(
        msgspec.structs.replace(s, fields=tuple(_through(s, f, home) for f in s.fields)) for s in made
    )
    dims = dims or {"group": Size(8, 8), "sample": Size(8, 8), "prompt": Size(32, 64), "response": Size(4, 8)}
    return Plan(
        graph, doc, dims, RunDecl(), 0, (), False, OWNERS,
        {name: _hop(name, home[name], made, set(folds)) for name in hops}, made,
    )  # fmt: skip


def _through(seam: Seam, field: SeamField, home: Mapping[str, str]) -> SeamField:
    """A field that one side of the driver's process wrote and the other reads passes through it."""
    crosses = (home[field.producer] == "driver") != (home[seam.reader] == "driver")
    return msgspec.structs.replace(field, driver=(field.mean_bytes, field.max_bytes)) if crosses else field


def _hop(name: str, owner: str, seams: Sequence[Seam], folds: set[str]) -> Hop:
    written = {f.column: f for s in seams for f in s.fields if f.producer == name}
    stored = {"read": True, "written": True, "stored": "int32", "stored_shape": ("token",)}
    columns = tuple(
        Column(c, "array", "int32", ("token",), f.type, f.facts, f.mean_bytes, f.max_bytes, **stored)  # type: ignore[arg-type]
        for c, f in written.items()
    )
    mine = [s for s in seams if s.reader == name]
    reads = tuple(Read(f.port, f.producer, f.column, s.source, "same") for s in mine for f in s.fields)
    watches = tuple(
        Watch(port, s.source, port, "queue", None if s.delay or port.startswith("_") else "trajectory")
        for s in mine
        for port in s.control
    )
    return Hop(
        name=name, use=f"hops.test.{name}", kind="fold" if name in folds else "hop", owner=owner,
        rows="trajectory", makes_rows=False, concurrent=False, lifetime="consumed", columns=columns,
        dims=("token",), bounds=(72,), reads=reads, watches=watches, trigger=(),
        group=(), home=owner, outputs={}, initial={}, config={}, bound={}, resources={},
        uses=None, slots=1, block_bytes=64, queue=1, every=1, place="hops/test.py:1:1", doc="A hop of a test.",
    )  # fmt: skip
