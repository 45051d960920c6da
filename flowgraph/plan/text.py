"""A plan as text: what every hop makes and reads, and what crosses every seam. The golden plans are this.

It says nothing of the machine: threads stand as a share of its cores.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowgraph.engines.registry import ENGINES, EngineOptions, servers
from flowgraph.plan.plan import Column, Hop, Owner, Plan, Read, Seam
from flowgraph.spec.forms import Bits, PerRow, Prefix
from flowgraph.spec.units import counted, size_text


def plan_text(plan: Plan) -> str:
    """The whole plan; equal plans give equal texts."""
    lines = [f"graph {plan.graph}: {counted(plan.run.steps, 'step')}, max_lag {plan.max_lag}"]
    lines.append(f"passes {' '.join(plan.passes) or 'none'}")
    lines.append(f"through the driver {size_text(plan.driver_bytes)}/step")
    for owner in plan.owners.values():
        lines.append(_owner(owner))
    for hop in plan.hops.values():
        lines += ["", *_hop(hop)]
    lines += ["", "seams, mean to max bytes a step"]
    lines += [_seam(seam) for seam in plan.seams]
    return "\n".join(lines) + "\n"


def _owner(owner: Owner) -> str:
    threads = (
        str(owner.threads) if owner.threads else "all cores" if owner.share == 1 else f"cores / {owner.share}"
    )
    holds = [_engine(owner.engine)] if owner.engine else []
    holds += [f"learner {owner.learner.model}"] if owner.learner else []
    holds += [f"tokenizer {owner.tokenizer}"] if owner.tokenizer else []
    parts = [
        *([f"{owner.processes} processes"] if owner.processes > 1 else []),
        f"threads {threads}",
        f"arena {size_text(owner.arena_bytes)}",
        f"maps {', '.join(owner.maps)}",
        *holds,
    ]
    return f"owner {owner.name}: {'; '.join(parts)}"


def _engine(options: EngineOptions) -> str:
    """`engine smollm2-135m`, and for one in servers of its own what they are: `… in 2 sglang servers`."""
    count = servers(options)
    name = next(name for name, kind in ENGINES.items() if isinstance(options, kind))
    return f"engine {options.model}" + (f" in {counted(count, f'{name} server')}" if count else "")


def _hop(hop: Hop) -> Iterator[str]:
    rows = f"on {hop.rows} rows" if hop.rows else "on events"
    every = f", every {hop.every}" if hop.every > 1 else ""
    yield f"{hop.kind} {hop.name} = {hop.use} @{hop.owner} {rows}{every}"
    if hop.group:
        yield f"  fires as one: {' → '.join(hop.group)}"
    if hop.slots:
        at = f" in {hop.home}" if hop.home != hop.owner else ""
        yield f"  {hop.slots} blocks of {size_text(hop.block_bytes)}{at}, until {hop.lifetime}"
    for one in hop.reads:
        yield f"  reads {_read(one)}"
    for watch in hop.watches:
        every = f" every {watch.every}" if watch.every > 1 else ""
        output = f".{watch.output}" if watch.output else ""
        yield f"  {watch.mode} {watch.port} ← {watch.producer}{output}{every}"
    for column in hop.columns:
        yield f"  gives {_column(column)}"


def _read(one: Read) -> str:
    how = {"same": "", "concat": ", joined", "offsets": ", joined and shifted", "each": ", one a row"}
    text = f"{one.port} ← {one.producer}.{one.column}{how.get(one.gather, ', one a leaf')}"
    if one.handed:
        return f"{text}, handed on"
    if one.derive:
        return f"{text}, made by {one.derive} of {', '.join(n.column for n in one.needs)}"
    return text + (f", with {', '.join(f'{n.producer}.{n.column}' for n in one.needs)}" if one.needs else "")


def _column(column: Column) -> str:
    facts = "".join(f" {fact}" for fact in column.facts)
    text = f"{column.name} {column.type}{facts}"
    if not column.written:
        return f"{text}: {'handed on or derived' if column.read else 'not read'}, not written"
    form = f"{how}, " if (how := form_text(column)) else ""
    return f"{text}: {form}{size_text(column.mean_bytes)} to {size_text(column.max_bytes)}"


def form_text(column: Column) -> str:
    """How a column lies, where that is not as the hop gives it."""
    narrow = [f"as {column.stored}"] if column.stored != column.dtype else []
    match column.form:
        case Bits():
            return "as bits"
        case PerRow(dim=dim):
            return ", ".join([f"one a {dim}", *narrow])
        case Prefix():
            return ", ".join(["prefixes once", *narrow])
    return "".join(narrow)


def _seam(seam: Seam) -> str:
    size = f"{size_text(seam.mean_bytes)} to {size_text(seam.max_bytes)}" if seam.fields else "no payload"
    ports = ", ".join([*(f.port for f in seam.fields), *(f"({p})" for p in seam.control)])
    facts = [f"delay {seam.delay}"] if seam.delay else []
    facts += [f"max_lag {seam.max_lag}"] if seam.max_lag is not None else []
    facts += [f"every {seam.every}"] if seam.every > 1 else []
    how = "; ".join([size, seam.crossing, f"until {seam.lifetime}", *facts])
    return f"  {seam.source} → {seam.reader}: {how}: {ports}"
