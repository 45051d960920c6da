"""Rings that were drawn, as what a user writes: a module of hops, and a graph file."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jaxtyping
import msgspec
import numpy as np
import yaml

from flowgraph import Array, Below, Json, Latest, Rows, Scalars, Text, fold, hop
from flowgraph.ir.graph import Graph
from flowgraph.passes.pipeline import load
from flowgraph.spec.dims import Size
from flowgraph.spec.types import Fact, Lifetime
from tests.graphs.content import MASK, Col, Scene, as_float, digest, make

MODULE = "generated_hops"
SPELLED = {
    f"{ours}{bits}": f"{theirs}{bits}"
    for ours, theirs, widths in (
        ("bool", "Bool", ("",)),
        ("int", "Int", (8, 16, 32, 64)),
        ("uint", "UInt", (8, 16, 32, 64)),
        ("float", "Float", (16, 32, 64)),
        ("bfloat", "BFloat", (16,)),
    )
    for bits in widths
}


class Take(NamedTuple):
    """One input: a column by way of a hop. shape: as it is read; mask: whether the port promises a Mask."""

    port: str
    via: str
    column: Col
    shape: str
    mask: bool = False


class Made(NamedTuple):
    """One hop that was drawn. rows: what it works on; role: source, sampler, sync or a plain hop."""

    name: str
    rows: str
    takes: tuple[Take, ...] = ()
    gives: tuple[Col, ...] = ()
    owner: str | None = None
    lifetime: Lifetime = "consumed"
    concurrent: bool = False
    every: int = 1
    role: str = "hop"


class Ring(NamedTuple):
    """full: every dim has one size, and the data fills it. tail: the hop whose trajectories are buffered."""

    dims: dict[str, Size]
    hops: tuple[Made, ...]
    tail: str
    full: bool = False
    max_lag: int = 0
    steps: int = 2

    @property
    def batch(self) -> int:
        return self.dims["group"].max * self.dims["sample"].max


def graph_of(ring: Ring, directory: Path) -> tuple[Graph, dict[str, Any]]:
    """The checked graph, and the file's content. Its hops can be imported until the next ring is written."""
    module = types.ModuleType(MODULE)
    alone = ring._replace(hops=())  # what a hop closes over is hashed in verify mode, at every firing
    for one in ring.hops:
        setattr(module, one.name, _function(one, alone))
    sys.modules[MODULE] = module
    path = directory / "random.yaml"
    path.write_text(yaml.safe_dump(_file(ring), sort_keys=False))
    loaded = load(str(path))
    assert not loaded.diagnostics, loaded.diagnostics
    assert loaded.graph is not None
    assert loaded.root is not None
    return loaded.graph, loaded.root.plain()


# --- the graph file --------------------------------------------------------------------------------------------


def _file(ring: Ring) -> dict[str, Any]:
    groups = [one.name for one in ring.hops if one.rows == "group"]
    hops = {one.name: _declared(one) for one in ring.hops if one.role == "source"}
    hops |= {one.name: _declared(one) for one in ring.hops if one.rows == "group" and one.role != "source"}
    hops["dispatch"] = {
        "use": "hops.dispatch.watermark",
        "in": {
            "group": groups[-1],
            "finished": ring.tail,
            "free": "buffer",
            "dropped": "batch",
            "version": {"from": "sync", "delay": 1, "max_lag": ring.max_lag},
        },
    }
    hops |= {one.name: _declared(one) for one in ring.hops if one.rows == "trajectory"}
    pooled = {"trajectory": ring.tail, "taken": "batch", "dropped": "batch"}
    hops["buffer"] = {"use": "hops.buffer.ready", "in": pooled}
    hops["batch"] = {"use": "hops.batch.oldest_first", "in": {"ready": "buffer"}}
    hops |= {one.name: _declared(one) for one in ring.hops if one.rows == "step"}
    owners = {one.owner for one in ring.hops} - {"driver", None}
    bounds = [
        fact.bound for one in ring.hops for c in one.gives for fact in c.facts if isinstance(fact, Below)
    ]
    sizes = {name: s for name, s in ring.dims.items() if name != "vocab" or name in bounds}
    return {
        "graph": "random",
        "dims": {name: {"mean": size.mean, "max": size.max} for name, size in sizes.items()},
        "owners": {owner: {} for owner in ("rollout", "trainer", "third") if owner in owners},
        "hops": hops,
        "run": {"steps": ring.steps, "seed": 1, "deadline": 20},
    }


def _declared(one: Made) -> dict[str, Any]:
    ports = {}
    for take in one.takes:
        ref = take.via if take.port == take.column.name else f"{take.via}.{take.column.name}"
        ports[take.port] = ref if one.every == 1 else {"from": ref, "every": one.every}
    owner = {} if one.owner is None else {"owner": one.owner}
    return {"use": f"{MODULE}.{one.name}", "in": ports, **owner} if ports else {"use": f"{MODULE}.{one.name}"}


# --- the hops --------------------------------------------------------------------------------------------------


class Cursor(msgspec.Struct):
    at: int = 0


def _function(one: Made, ring: Ring) -> Callable[..., Any]:
    if one.role == "source":
        return _source(one, ring)
    kind: Any = Annotated[int, Latest(initial=0)]
    outputs = {c.name: annotation(c, c.shape, c.facts) for c in one.gives}
    returns = tuple_type(one.name, {**outputs, "metrics": Annotated[dict[str, float], Scalars()]})

    def call(ports: Mapping[str, Any]) -> Any:
        if one.role == "sync":
            return int(ports["batch_id"]) + 1
        hashed = digest(ports)
        made = _outputs(one, ring, ports, np.random.default_rng(list(hashed)))
        return returns(**made, metrics={"seen": as_float(hashed)})

    def run(**ports: Any) -> Any:
        return call(ports)

    async def run_async(**ports: Any) -> Any:
        for _ in range(digest(ports)[0] % 4):  # so that firings end in another order than they began
            await asyncio.sleep(0)
        return call(ports)

    function: Any = run_async if one.concurrent else run
    takes = {t.port: annotation(t.column, t.shape, (MASK,) if t.mask else ()) for t in one.takes}
    signed(function, takes, kind if one.role == "sync" else returns)
    return hop(lifetime=one.lifetime)(function)


def _source(one: Made, ring: Ring) -> Callable[..., Any]:
    row = tuple_type("Group", {c.name: annotation(c, c.shape, c.facts) for c in one.gives})
    rows = 1 << 30 if ring.max_lag else ring.steps * ring.dims["group"].max
    result = tuple_type("Groups", {"group": Annotated[list[row], Rows("group")]})

    def source(state: Cursor) -> Any:
        if state.at >= rows:
            return result([])
        state.at += 1
        rng = np.random.default_rng(state.at)
        return result([row(**_outputs(one, ring, {}, rng))])

    signed(source, {"state": Cursor}, result)
    return fold(source="group", lifetime=one.lifetime)(source)


def signed(function: Any, ports: Mapping[str, Any], returns: Any) -> None:
    """Give a function the signature that a user would have written."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=hint) for name, hint in ports.items()]
    function.__annotations__ = {**ports, "return": returns}
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)


def tuple_type(name: str, fields: Mapping[str, Any]) -> Any:
    return typing.NamedTuple(name, list(fields.items()))


def annotation(column: Col, shape: str, facts: tuple[Fact, ...]) -> Any:
    """The annotation of a port of a column."""
    if column.kind != "array":
        marker = Text if column.kind == "text" else Json
        return Annotated[Any, marker(shape, column.max, column.max)]
    base = getattr(jaxtyping, SPELLED[column.dtype])[Array, shape]
    return Annotated[(base, *facts)] if facts else base


def _outputs(one: Made, ring: Ring, ports: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    scene = Scene(_sizes(one, ring, ports, rng), one.rows, ring.dims, ring.full)
    made: dict[str, Any] = {}
    for column in one.gives:
        made[column.name] = make(column, scene, rng, {**ports, **made})
    return made


def _sizes(one: Made, ring: Ring, ports: Mapping[str, Any], rng: np.random.Generator) -> dict[str, int]:
    """Sizes of dims: of what was read, or, for who makes rows, invented."""
    sizes = {"trajectory": ring.batch}
    for take in one.takes:
        value = ports[take.port]
        if take.column.bounds:
            sizes |= {"leaf": len(value) - 1, "token": int(value[-1])}
        elif take.shape:
            sizes[take.shape.split()[0]] = len(value)
    if one.role == "source":
        most = ring.dims["prompt"].max
        sizes["prompt"] = most if ring.full else int(rng.integers(0, most + 1))
    if one.role == "sampler":
        leaves, each = ring.dims["leaf"].max, ring.dims["prompt"].max + ring.dims["response"].max
        count = leaves if ring.full else int(rng.integers(1, leaves + 1))
        sizes |= {
            "leaf": count,
            "token": count * each if ring.full else int(rng.integers(0, count * each + 1)),
        }
    return sizes
