"""What may stand in a graph file, as types: the reader takes its keys from here, and `flowgraph schema` its schema.

A field's name in the file is its `encode_name`; the docstrings and descriptions are what an editor shows.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from flowgraph.engines.registry import EngineOptions
from flowgraph.learners.registry import LearnerOptions
from flowgraph.spec.dims import Size
from flowgraph.spec.units import AMOUNT

# What counts things: never negative, and small enough that products of a few of them stay exact.
MANY = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=MANY)]
Positive = Annotated[int, Meta(ge=1, le=MANY)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Written = Annotated[str, Meta(pattern=f"^ *{AMOUNT} *$", examples=["64 KB/step", "2 GB"])] | Bytes


PROCESSES = (
    "Of a learner: among how many its trajectories are shared out; the same as ranks: {trajectory: n}."
)
RANKS = "By which dims several processes share its work, and among how many; by others than trajectory only priced."


class InputForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where an input comes from, and how late it may be."""

    source: Annotated[str, Meta(description="The hop, or hop.column, that it reads.")] = field(name="from")
    delay: Annotated[Count, Meta(description="Steps between writing and reading: 1 on a back edge.")] = 0
    max_lag: Annotated[Count, Meta(description="The most versions a row may be behind.")] | UnsetType = UNSET
    every: Annotated[Positive, Meta(description="Read only each such value.")] = 1


class HopForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One hop: a typed function, what it reads, and its options."""

    use: Annotated[str, Meta(description="Import path of a function with @hop, @fold or @effect.")]
    inputs: dict[str, str | InputForm] | UnsetType | None = field(name="in", default=UNSET)
    config: dict[str, Any] | UnsetType | None = field(name="with", default=UNSET)
    owner: Annotated[str, Meta(description="The process that it runs in.")] | UnsetType = UNSET
    capacity: Annotated[Count, Meta(description="Rows it has made that may wait.")] | UnsetType = UNSET


class OwnerForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One process, and the engine or learner that it alone holds; or several, that share a learner's work."""

    processes: Annotated[Positive, Meta(description=PROCESSES)] = 1
    threads: (
        Annotated[Positive, Meta(description="Of all its processes; default: the cores, shared out.")]
        | UnsetType
    ) = UNSET
    ranks: Annotated[dict[str, Positive], Meta(description=RANKS)] | UnsetType = UNSET
    engine: EngineOptions | UnsetType = UNSET
    learner: LearnerOptions | UnsetType = UNSET


class RunDecl(msgspec.Struct, forbid_unknown_fields=True):
    """`run:`. deadline: seconds that any one firing or start may take before the run fails by name."""

    steps: Positive = 1
    seed: Seed = 0
    deadline: Seconds = 600.0
    show: list[str] = []


class ModelLock(msgspec.Struct, forbid_unknown_fields=True):
    """`models: {name: {source, sha256}}`: what a run used, so that another run can insist on it."""

    source: str
    sha256: str


class GraphForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A ring of hops, checked and priced before it runs."""

    graph: Annotated[str, Meta(description="Its name: letters, digits, - and _.")]
    doc: str = ""
    dims: dict[str, Positive | Size] | UnsetType | None = UNSET
    owners: dict[str, OwnerForm | None] | UnsetType | None = UNSET
    hops: dict[str, HopForm]
    budgets: dict[str, Written | list[Written]] | UnsetType | None = UNSET
    run: RunDecl | UnsetType = UNSET
    models: dict[str, ModelLock] | UnsetType = UNSET


@cache
def kinds(form: type[msgspec.Struct]) -> dict[str, Any]:
    """The keys of one mapping of the file, each with the type of its value."""
    return {f.encode_name: f.type for f in msgspec.structs.fields(form)}
