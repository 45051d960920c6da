"""Rings without a model: the library's folds and pure hops are real, everything else is made up from its port types.

What is made up is what a checked graph may count on and no more: the right dtype and rank, sizes within their bounds
and equal wherever ports share a dim, bounds of ranges that rise from 0 to the end. So a graph that the check lets
through and that fails here has a fault that the check should have found.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from flowgraph import models
from flowgraph.ir.graph import Graph, is_offsets
from flowgraph.models import ModelFacts, TensorFact
from flowgraph.passes.sizes import dim_values
from flowgraph.plan import columns as lowering
from flowgraph.plan.compile import compile_graph
from flowgraph.plan.plan import Column, Hop, Plan
from flowgraph.runtime import executors
from flowgraph.runtime import ring as driver
from flowgraph.runtime.executors import InProcess
from flowgraph.runtime.ring import Ring
from flowgraph.runtime.transport import arenas
from flowgraph.runtime.worker import Worker
from flowgraph.spec.dims import Expr, parse
from flowgraph.spec.forms import Range
from flowgraph.spec.types import dtype_of

# Dims that grow with the rows: their size is data, even where the graph gives them one number.
GROWING = ("trajectory", "leaf", "token")
TENSORS = (TensorFact("weight", (2, 3), "float32"), TensorFact("bias", (3,), "float32"))
MODEL = ModelFacts(
    layers=1,
    hidden=2,
    heads=1,
    kv_heads=1,
    head_dim=2,
    vocab=100,
    max_position=64,
    experts=None,
    top_k=None,
    tensors=TENSORS,
)


class Made(dict[str, Any]):
    """Outputs by name, in the form that a worker takes from a hop with several."""

    def _asdict(self) -> dict[str, Any]:
        return self


def is_real(hop: Hop) -> bool:
    """Whether a hop runs as it is: every fold, and the pure hops of the library."""
    return hop.kind == "fold" or (hop.kind == "hop" and hop.use.startswith("hops."))


class GeneratedWorker(Worker):
    """A worker that holds no engine and no learner: what is not real is generated, the same for the same seed."""

    async def start(self) -> None:
        self.owner = msgspec.structs.replace(self.owner, engine=None, learner=None)
        self.resources = {"engine": None, "learner": None}  # bound to hops that are then not called
        await super().start()
        self.resources = {name: held for name, held in self.resources.items() if held is not None}
        self.calls |= {
            name: _generated(self.plan, hop) for name, hop in self.hops.items() if not is_real(hop)
        }


_tokenizer = functools.cache(models.Tokenizer)  # reading one takes longer than a step


@contextmanager
def generating() -> Iterator[None]:
    """Every worker that is made within, the driver's own too, is a GeneratedWorker; a tokenizer is read once."""
    with ExitStack() as stack:
        for module in (driver, executors):
            stack.enter_context(mock.patch.object(module, "Worker", GeneratedWorker))
        stack.enter_context(mock.patch.object(models, "Tokenizer", _tokenizer))
        yield


def _generated(plan: Plan, hop: Hop) -> Callable[..., Any]:
    rng = np.random.default_rng([plan.run.seed % 2**64, zlib.crc32(hop.name.encode())])
    versions = itertools.count(hop.every, hop.every)

    def now(**values: Any) -> Made:
        return generate(plan, hop, values, next(versions), rng)

    async def later(**values: Any) -> Made:
        return now(**values)

    return later if hop.concurrent else now


def generate(plan: Plan, hop: Hop, values: Mapping[str, Any], version: int, rng: np.random.Generator) -> Made:
    """One firing's outputs. values: what the hop read, by port; version: what it publishes, if it does."""
    sizes = _sizes(plan, hop, values, rng)
    made = Made({column.name: _value(column, sizes, rng) for column in hop.columns})
    for name, kind in hop.outputs.items():
        if kind == "scalars":
            made[name] = {"generated": float(rng.random())}
        elif kind == "value":
            made[name] = version
    return made


def _sizes(plan: Plan, hop: Hop, values: Mapping[str, Any], rng: np.random.Generator) -> dict[str, int]:
    """Dim name → size: of what was read where that has it, else drawn within the bound."""
    sizes: dict[str, int] = {}
    for read in hop.reads:
        column, value = plan.hops[read.producer].column(read.column), values[read.port]
        rate = {"each": "trajectory", "repeat": "leaf"}.get(read.gather)
        if rate is not None:
            sizes[rate] = len(value)
        elif column.kind == "array":
            for dim, n in zip(map(parse, column.shape), value.shape, strict=True):
                if len(dim.names) == 1:
                    (name,) = dim.names
                    least, next_ = dim.at({name: 0}), dim.at({name: 1})
                    sizes[name] = int((n - least) / (next_ - least))
    bounds = dim_values(hop.rows, plan.dims, "max")
    for name in sorted({name for column in hop.columns for dim in column.shape for name in parse(dim).names}):
        if name not in sizes:
            fixed = name in plan.dims and name not in GROWING and plan.dims[name].mean == plan.dims[name].max
            most = int(bounds[name])
            sizes[name] = most if fixed else int(rng.integers(min(1, most), most + 1))
    return sizes


def _value(column: Column, sizes: Mapping[str, int], rng: np.random.Generator) -> Any:
    if column.kind == "tensors":
        import torch

        return {
            slot.name: torch.zeros(slot.shape, dtype=getattr(torch, slot.dtype)) for slot in column.tensors
        }
    dims = [parse(dim) for dim in column.shape]
    shape = tuple(int(dim.at(sizes)) for dim in dims)
    if column.kind != "array":
        items = [_item(column.kind, rng) for _ in range(shape[0] if shape else 1)]
        return items if shape else items[0]
    return _array(column, dims, shape, sizes, rng)


def _item(kind: str, rng: np.random.Generator) -> Any:
    n = int(rng.integers(0, 1000))
    return f"text {n}" if kind == "text" else {"n": n}


def _array(
    column: Column,
    dims: list[Expr],
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> Any:
    dtype = dtype_of(column.dtype)
    if len(dims) == 1 and is_offsets(dims[0]):
        inner = np.sort(rng.integers(0, sizes.get("token", 0) + 1, max(0, shape[0] - 2)))
        return np.array([0, *inner, sizes.get("token", 0)][: shape[0]], dtype)
    bounds = [promise.below for promise in column.promises if isinstance(promise, Range)]
    if len(bounds) != len(column.facts) and column.facts != ("Mask",):
        return np.zeros(shape, dtype)  # which keeps every promise
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0, min([100, *bounds]), shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def small(graph: Graph) -> Plan:
    """The graph compiled with a model of two small tensors, so that a run writes no hundreds of megabytes."""
    with mock.patch.object(lowering, "facts", return_value=MODEL):
        return compile_graph(graph)


class Observed:
    """An observer that is told everything and keeps the steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)

    def event(self, record: dict[str, Any]) -> None:
        pass


def run_generated(graph: Graph, paths: Mapping[str, str]) -> Ring:
    """Run a graph on `inproc` with generated data. paths: model → directory, of the tokenizers."""
    plan = small(graph)
    with generating(), arenas(plan, alone=True) as memory:
        executor = InProcess()
        ring = Ring(plan, executor, paths, memory, Observed())
        try:
            executor.start(plan, paths, memory)
            ring.start()
            ring.run()
        finally:
            executor.stop(0)
    return ring
