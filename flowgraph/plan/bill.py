"""The bill: what a plan costs, in bytes a step over every seam and in bytes held by every process."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flowgraph.plan.held import held
from flowgraph.plan.plan import Hop, Plan, Seam, SeamField

NOBODY = " → nobody"  # a column that is written, and that no hop reads
PASSING = " passing through"  # blocks of another owner's hop, on their way through the driver's memory


class Cost(msgspec.Struct, frozen=True):
    """Bytes on average and at most, and what they are made of: (name, mean), largest first.

    priced: whether every part is known; a model that is not pulled has no price
    """

    mean: float
    max: int
    parts: tuple[tuple[str, float], ...]
    priced: bool = True


class Bill(msgspec.Struct, frozen=True):
    """Traffic is a step's, memory is held at once.

    seams: (source, reader) → what is read; transports: → what crosses by it
    traffic: owner → payload in or out of its process; memory: owner → its arena, engine and learner
    arenas: the shared memory of all owners, by hop
    """

    seams: dict[tuple[str, str], Cost]
    transports: dict[str, Cost]
    traffic: dict[str, Cost]
    memory: dict[str, Cost]
    arenas: Cost


def bill(plan: Plan) -> Bill:
    """Price a whole plan. Pure but for reading model configs."""
    transports = dict.fromkeys(seam.transport for seam in plan.seams if seam.fields)
    return Bill(
        seams={(s.source, s.reader): _cost((f.port, f) for f in s.fields) for s in plan.seams},
        transports={
            t: _cost((_name(s), s) for s in plan.seams if s.transport == t and s.fields) for t in transports
        },
        traffic={name: traffic(plan, name) for name in plan.owners},
        memory={name: memory(plan, name) for name in plan.owners},
        arenas=_held(part for name in plan.owners for part in _blocks(plan.hops.values(), name)),
    )


def traffic(plan: Plan, owner: str) -> Cost:
    """Payload a step in or out of an owner's process: what one of its hops wrote or read, and not both.

    The one place that says what passes through a process, be it the driver's.
    """
    if owner == "driver":
        fields = [(_name(s), *f.driver, f.priced) for s in plan.seams for f in s.fields]
        return _sum([*fields, *((hop + NOBODY, *through, True) for hop, through in plan.unread.items())])
    crossing = [(s, [f for f in s.fields if _crosses(plan, s, f, owner)]) for s in plan.seams]
    return _cost((_name(seam), field) for seam, fields in crossing for field in fields)


def _crosses(plan: Plan, seam: Seam, field: SeamField, owner: str) -> bool:
    return (plan.hops[field.producer].owner == owner) != (plan.hops[seam.reader].owner == owner)


def memory(plan: Plan, owner: str) -> Cost:
    """What a process is sure to hold at its most: its arena, and the tensors of its engine and learner."""
    resources = [(h.kind, h.nbytes) for h in held(plan, plan.owners[owner])]
    return _held([*_blocks(plan.hops.values(), owner), *resources])


def _blocks(hops: Iterable[Hop], owner: str) -> list[tuple[str, int | None]]:
    """Blocks in an owner's arena: those its hops write, and those that readers find there."""
    mine = [h for h in hops if owner in (h.owner, h.home)]
    return [
        (f"blocks of {h.name}" + ("" if h.owner == owner else PASSING), h.slots * h.block_bytes) for h in mine
    ]


def _name(seam: Seam) -> str:
    return f"{seam.source} → {seam.reader}"


def _cost(parts: Iterable[tuple[str, Seam | SeamField]]) -> Cost:
    return _sum(
        (
            name,
            p.mean_bytes,
            p.max_bytes,
            all(f.priced for f in p.fields) if isinstance(p, Seam) else p.priced,
        )
        for name, p in parts
    )


def _sum(parts: Iterable[tuple[str, float, int, bool]]) -> Cost:
    """The sum of (name, mean, bound, priced); parts of one name are one part."""
    means: dict[str, float] = {}
    most, all_priced = 0, True
    for name, mean, bound, priced in parts:
        means[name] = means.get(name, 0.0) + mean
        most += bound
        all_priced &= priced
    return Cost(sum(means.values()), most, _ranked(means), all_priced)


def _held(parts: Iterable[tuple[str, int | None]]) -> Cost:
    made = dict(parts)
    known = {name: n for name, n in made.items() if n}
    total = sum(known.values())
    return Cost(total, total, _ranked(known), None not in made.values())


def _ranked(parts: dict[str, float] | dict[str, int]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(((n, float(v)) for n, v in parts.items() if v), key=lambda p: (-p[1], p[0])))
