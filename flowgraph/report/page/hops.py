"""A hop on the page: its signature as it is wired here, its docstring, and what it is to the run."""

from __future__ import annotations

from flowgraph.plan.plan import Hop, Plan
from flowgraph.report.draw.labels import node_text


def signature(plan: Plan, hop: Hop) -> str:
    """Ports with their types and sources, options with their values, and what it gives, in the form of a function."""
    lines = [f"{hop.kind} {hop.use.rpartition('.')[2]}("]
    for seam in (s for s in plan.seams if s.reader == hop.name):
        for field in seam.fields:
            facts = "".join(f" {fact}" for fact in field.facts)
            lines.append(f"    {field.port}: {field.type}{facts},  # {field.producer}.{field.column}")
    for watch in hop.watches:
        rows = f"{watch.rows} rows" if watch.rows else "value"
        lines.append(f"    {watch.port}: {watch.mode} of {rows},  # {watch.producer}")
    options = {**hop.config, **hop.bound}
    lines += ["    *,"] if options or hop.resources else []
    lines += [f"    {name}: {what}," for name, what in hop.resources.items()]
    lines += [f"    {name} = {value!r}," for name, value in options.items()]
    gives = [f"    {c.name}: {c.type}" + "".join(f" {fact}" for fact in c.facts) for c in hop.columns]
    shown = {c.name for c in hop.columns}
    gives += [
        f"    {name}: {kind}" for name, kind in hop.outputs.items() if name not in shown and kind != "rows"
    ]
    return "\n".join([*lines, ") ->", *(gives or ["    nothing"])])


def facts(plan: Plan, hop: Hop) -> list[tuple[str, str]]:
    """Name and value of each thing that is worth a line."""
    _, *lines = node_text(plan, hop).lines
    found = [
        ("use", hop.use),
        ("written in", hop.place),
        ("owner", hop.owner),
        ("works on", ", ".join(lines)),
        ("gives live until", hop.lifetime),
        ("fires as one with", " → ".join(hop.group) if hop.group else ""),
        ("memory", f"{hop.slots:,} blocks of at most {hop.block_bytes:,} B" if hop.slots else ""),
    ]
    return [(name, value) for name, value in found if value]
