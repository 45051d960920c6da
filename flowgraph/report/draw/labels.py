"""What a diagram says, whatever draws it: the lines of every node and edge, their style, their tooltips."""

from __future__ import annotations

from typing import Literal

import msgspec

from flowgraph.passes.sizes import rows_per_step
from flowgraph.plan.plan import Hop, Plan, Seam
from flowgraph.report.audit.rows import HOT, Audit, FieldRow, Saving, SeamRow
from flowgraph.spec.dims import Size
from flowgraph.spec.units import per_step, percent_text, size_text

Line = Literal["solid", "dashed", "dotted"]
OFF = 10.0  # percent between measured and predicted that deserve a second look
PLURAL = {"group": "groups", "trajectory": "trajectories", "step": "batches"}


class NodeText(msgspec.Struct, frozen=True):
    """name in bold, then lines. owner: whose colour it has, which only repeats what the first line says."""

    name: str
    lines: tuple[str, ...]
    owner: str
    tooltip: str


class EdgeText(msgspec.Struct, frozen=True):
    """shape (monospace) and more ("+5 fields"); before → price (bold); measured; how, until and by (grey).

    before: the price without any pass, where it differs; by: the pass that saves most of it, and how many more do
    over: the budget that it breaks
    line: solid for bytes that the source wrote, dashed where most are another hop's, dotted without payload
    back: delay and max_lag of a back edge
    hot: it alone carries more than half of all bytes, or breaks a budget. off: measured and predicted differ notably
    """

    shape: str
    more: str
    price: str
    measured: str
    how: str
    until: str
    back: str
    line: Line
    hot: bool
    off: bool
    nbytes: float
    tooltip: str
    before: str = ""
    by: str = ""
    over: str = ""


def node_text(plan: Plan, hop: Hop) -> NodeText:
    on = f" ×{n}" if (n := plan.processes(hop)) > 1 else ""  # processes that it fires on at once
    lines = [f"{hop.owner} · {_resource(plan, hop.owner)}{on}", rows_text(plan, hop)]
    lines += _kept(hop) if hop.kind == "fold" else []
    return NodeText(hop.name, tuple(lines), hop.owner, _node_tooltip(hop))


def held_by(plan: Plan, name: str) -> str:
    """What an owner holds, an engine, a learner, or nothing but its cores; and in how many processes, if in several."""
    owner = plan.owners.get(name)
    several = f", {owner.processes} processes" if owner and owner.processes > 1 else ""
    return _resource(plan, name) + several


def _resource(plan: Plan, name: str) -> str:
    owner = plan.owners.get(name)
    return "engine" if owner and owner.engine else "learner" if owner and owner.learner else "cpu"


def _kept(hop: Hop) -> list[str]:
    """The capacity of what a fold keeps: of rows in flight or ready, and of the queue of those that it makes."""
    room = [] if hop.room is None else [f"{'in flight' if hop.makes_rows else 'ready'} ≤{hop.room:,}"]
    queue = [f"queue {hop.queue}"] if hop.makes_rows else []
    return [*room, *queue] or ["ledger"]


def rows_text(plan: Plan, hop: Hop) -> str:
    """`64 trajectories/step`, `1 batch/step`, `1 batch/5 steps`; `on events` for a hop without rows."""
    if hop.rows is None:
        return "on events"
    count = rows_per_step(hop.rows, plan.dims, "mean")
    singular = "batch" if hop.rows == "step" else hop.rows
    noun = singular if count == 1 else PLURAL[hop.rows]
    return f"{count:g} {noun}/step" if hop.every == 1 else f"{count:g} {noun}/{hop.every} steps"


def edge_text(plan: Plan, seam: Seam, row: SeamRow) -> EdgeText:
    """What one seam says. row: the audit's of the same seam."""
    until = f"until {seam.lifetime}"
    back = _back(seam)
    every = f"every {seam.every}" if seam.every > 1 else ""
    if not seam.fields:
        shape, more = _control_shape(plan, seam)
        return EdgeText(
            shape, more, back or "0 B/step", "", "control", until, back,
            "dotted", False, False, 0.0, _tooltip(seam, row),
        )  # fmt: skip
    largest = max(row.fields, key=lambda f: (f.mean, f.max))
    rest = len(row.fields) - 1
    more = f"+{rest} field{'s' if rest > 1 else ''}" if rest else ""
    line: Line = "dashed" if row.by_reference * 2 > row.mean else "solid"
    measured = "" if row.measured is None else size_text(row.measured)
    before = "" if row.before is None else size_text(row.before)
    off = row.exceeds or row.off or (row.declared is not None and abs(row.declared) > OFF)
    onward = f"→ {seam.pushed.by}" if seam.pushed else ""
    how = ", ".join(word for word in (f"{seam.transport} {onward}".rstrip(), back, every) if word)
    return EdgeText(
        largest.type, more, _price(row), measured, how, until, back,
        line, row.share > HOT or bool(row.over), off, row.mean, _tooltip(seam, row),
        before if before != size_text(row.mean) else "", _by(row), row.over,
    )  # fmt: skip


def _by(row: SeamRow) -> str:
    """The pass that saves most of what is read and of what passes through the driver, `+2` for two more."""
    if not row.passes:
        return ""
    return f"by {row.passes[0]}" + (f" +{len(row.passes) - 1}" if len(row.passes) > 1 else "")


def _price(row: SeamRow) -> str:
    if row.priced:
        return per_step(row.mean)
    return f"{per_step(row.mean)} + unpriced" if row.mean else "unpriced"


def _back(seam: Seam) -> str:
    if not seam.delay:
        return ""
    return f"delay {seam.delay}" + ("" if seam.max_lag is None else f", max_lag {seam.max_lag}")


def _control_shape(plan: Plan, seam: Seam) -> tuple[str, str]:
    """The rows that a seam hands on, else the names of its events and values."""
    rows = [
        w.rows
        for w in plan.hops[seam.reader].watches
        if w.port in seam.control and w.mode != "event" and w.rows
    ]
    if rows:
        others = len(seam.control) - 1
        return f"{rows[0]} rows", f"+{others} more" if others > 0 else ""
    return ", ".join(seam.control) + (f", every {seam.every}" if seam.every > 1 else ""), ""


def is_forward(plan: Plan, seam: Seam) -> bool:
    """Whether a seam carries the work on: payload, or rows, neither late by a delay nor as a mere event."""
    if seam.delay:
        return False
    watches = plan.hops[seam.reader].watches if seam.reader in plan.hops else ()
    handed = any(w.port in seam.control and w.rows is not None and w.mode != "event" for w in watches)
    return bool(seam.fields) or handed


# --- tooltips ----------------------------------------------------------------------------------------------


def _node_tooltip(hop: Hop) -> str:
    first = hop.doc.strip().split("\n", 1)[0]
    lines = [f"{hop.name}: {hop.kind} {hop.use}", hop.place, first]
    lines += [f"gives {c.name}: {c.type}" + "".join(f" {f}" for f in c.facts) for c in hop.columns]
    return "\n".join(line for line in lines if line)


def _tooltip(seam: Seam, row: SeamRow) -> str:
    head = f"{seam.source} → {seam.reader}: {seam.crossing}, until {seam.lifetime}"
    if seam.every > 1:
        head += f", every {seam.every}"
    lines = [head, *([_back(seam)] if seam.delay else [])]
    lines += [_field_line(seam, f) for f in row.fields]
    if seam.pushed:
        lines.append(f"{seam.pushed.text}: {per_step(seam.pushed.mean_bytes)}")
    lines += [f"control: {', '.join(seam.control)}"] if seam.control else []
    if row.fields and row.priced:
        lines.append(f"mean {per_step(row.mean)}, at most {size_text(row.max)}")
    if row.before is not None:
        lines.append(
            f"as written {per_step(row.before)}, {per_step(row.driver_before or 0)} through the driver"
        )
        lines += [_saving_line(one) for one in row.saved]
    lines += [f"over the budget {row.over}"] if row.over else []
    if row.declared is not None:
        lines.append(f"measured {per_step(row.measured or 0)} ({percent_text(row.declared)})")
    return "\n".join(lines)


def _saving_line(one: Saving) -> str:
    parts = [(one.read, "read"), (one.driver, "through the driver")]
    said = [f"{'−' if n > 0 else '+'}{size_text(abs(n))} {what}" for n, what in parts if abs(n) > 0.5]
    return f"{one.name}: {', '.join(said)}"


def _field_line(seam: Seam, field: FieldRow) -> str:
    facts = "".join(f" {fact}" for fact in field.facts)
    price = per_step(field.mean) if field.priced else "unpriced"
    origin = f" from {field.producer}.{field.column}" if field.producer != seam.source else ""
    how = f", {field.encoding}" if field.encoding else ""
    return f"{field.port}: {field.type}{facts}{origin}{how}, {price}"


# --- the legend --------------------------------------------------------------------------------------------


def dims_text(dims: dict[str, Size]) -> str:
    """`group=8 sample=8 prompt≤64 (mean 32)`: fixed dims by =, bounded ones by ≤ with the priced mean."""
    parts = []
    for name, size in dims.items():
        fixed = size.mean == size.max
        parts.append(f"{name}={size.max:,}" if fixed else f"{name}≤{size.max:,} (mean {size.mean:,g})")
    return "  ".join(parts)


def totals_text(audit: Audit) -> str:
    text = f"all seams {_pair(audit.before, audit.total.mean)}"
    text += f"; through the driver {_pair(audit.driver_before, audit.driver.mean)}"
    if audit.total.measured is not None:
        text += f"; measured {per_step(audit.total.measured)}"
    return text


def _pair(before: float | None, after: float) -> str:
    """`538 MB → 8.46 KB/step`, or what there is where nothing changed."""
    same = before is None or size_text(before) == size_text(after)
    return per_step(after) if same or before is None else f"{size_text(before)} → {per_step(after)}"
