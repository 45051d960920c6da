"""What the simulator knows of a plan's hops: which make requests, which train, which publish weights, which begin."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import msgspec

from flowgraph.plan.plan import Hop, Plan
from flowgraph.spec.config import import_object
from flowgraph.spec.hop import HopSpec, read_spec

LENGTHS = "token", "prompt", "response", "leaf"  # what is known of a response


class Sampler(msgspec.Struct, frozen=True):
    """A hop that makes requests, and those that fire with it.

    known: the lengths of a trajectory that they tell, each by its place in `LENGTHS`
    limit: seconds that a request may take; backlogs: outputs that somebody reads of what engines can't compute
    """

    hop: Hop
    names: tuple[str, ...]
    known: tuple[tuple[str, int], ...]
    limit: float | None
    backlogs: tuple[str, ...]


def trains(hop: Hop) -> bool:
    """Whether it is the hop that makes new weights."""
    return hop.uses == "learner" and any(column.kind == "tensors" for column in hop.columns)


def _options(hop: Hop) -> tuple[HopSpec, dict[str, Any]]:
    """What a hop's signature says, and its options as the graph gives them, or else by default."""
    spec = read_spec(hop.use, import_object(hop.use))
    return spec, {p.name: p.default for p in spec.params if not p.required} | hop.config


def computes_anew(hop: Hop) -> bool:
    """Whether the KV of what is under way is computed again under the weights that this hop publishes."""
    return bool(_options(hop)[1].get("pause") != "in_place")


def sampler_of(plan: Plan, hop: Hop) -> Sampler:
    """A hop that makes requests, by its signature and by who reads what it publishes."""
    names = hop.group or (hop.name,)
    told = {dim.removesuffix("+1") for name in names for dim in plan.hops[name].dims}
    read = {w.output for other in plan.hops.values() for w in other.watches if w.producer == hop.name}
    spec, options = _options(hop)
    return Sampler(
        hop,
        names,
        known=tuple((name, i) for i, name in enumerate(LENGTHS) if name in told),
        limit=options.get("time_limit"),
        backlogs=tuple(p.name for p in spec.outputs if p.dtype == "Backlog" and p.name in read),
    )


def samplers(plan: Plan) -> dict[str, Sampler]:
    """The hops that make requests: those of an engine on trajectories, or else those that first write their tokens.

    Raises ValueError when nobody says how many tokens a trajectory has.
    """
    able = [h for h in plan.hops.values() if h.rows == "trajectory" and h.kind != "fold" and h.heads]
    found = [sampler_of(plan, h) for h in able if h.uses == "engine"]
    if not any(_tokens_told(one) for one in found):
        found += [
            one
            for h in able
            if h.uses != "engine" and _tokens_told(one := sampler_of(plan, h)) and not _reads(plan, one)
        ]
    if not any(_tokens_told(one) for one in found):
        raise ValueError(
            f"graph {plan.graph} has no hop to simulate as sampling: looked for one on trajectories that uses "
            f"an engine, or writes a column with the dim token, among {', '.join(h.name for h in able) or 'none'}; "
            'give the one that samples an output such as tokens: Int32[Array, "token"]'
        )
    return {one.hop.name: one for one in found}


def _tokens_told(sampler: Sampler) -> bool:
    return any(name == "token" for name, _ in sampler.known)


def _reads(plan: Plan, sampler: Sampler) -> bool:
    """Whether it reads tokens that somebody else wrote: it scores them, and samples none."""
    reads = (
        read for name in sampler.names for read in plan.hops[name].reads if read.producer not in sampler.names
    )
    return any("token" in plan.hops[read.producer].column(read.column).shape for read in reads)


def source(hop: Hop) -> Callable[..., Any]:
    """A source without an end, which gives a group without columns: what is in it nobody reads."""
    group = namedtuple("Group", ())()
    made = namedtuple("Groups", tuple(hop.outputs))  # type: ignore[misc]
    given = made(*([group] if kind == "rows" else 0 for kind in hop.outputs.values()))
    return lambda state: given
