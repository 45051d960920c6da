"""What stands in the tables of the page: seams, owners, states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowgraph.plan.plan import Plan
from flowgraph.report.audit import Audit, SeamRow
from flowgraph.report.census import Census
from flowgraph.report.census.census import BOUNDARIES
from flowgraph.report.draw.labels import held_by
from flowgraph.report.draw.text import clean, escape
from flowgraph.report.page.cells import UNKNOWN, Cell, size, table
from flowgraph.report.page.fields import field_table
from flowgraph.report.page.views import View
from flowgraph.spec.units import percent_text, share_text, size_text


def seam_table(view: View) -> str:
    ran = view.bytes_as == "measured"
    names = ["seam", "shape", "read", "at most", "share", "through the driver"]
    names += ["expected", "measured", "difference"] if ran else []
    names += ["naive raw", "naive base64"] if any(s.naive for s in view.seams) else []
    names += ["transport", "until"]
    names += ["passes"] if any(s.saved for s in view.seams) else []
    rows = [_seam(seam, names) for seam in view.seams]
    below = [field_table(seam) if seam.fields else "" for seam in view.seams]
    return table("seams", names, rows, [f"{s.source}→{s.reader}" for s in view.seams], below)


def _seam(seam: SeamRow, names: Sequence[str]) -> list[Cell]:
    cells = [
        Cell(_name(seam), html=True),
        Cell(_shape(seam), html=True),
        size(seam.mean, seam.priced),
        size(seam.max, seam.priced),
        Cell(share_text(seam.share), seam.share),
        size(seam.driver),
    ]
    if "measured" in names:
        off = UNKNOWN if seam.difference is None else Cell(percent_text(seam.difference), seam.difference)
        cells += [size(seam.expected), size(seam.measured), off]
    if "naive raw" in names:
        raw = seam.naive
        cells += [size(raw.controller_raw if raw else None), size(raw.controller_base64 if raw else None)]
    passes = [Cell(", ".join(seam.passes))] if "passes" in names else []
    return [*cells, Cell(seam.transport), Cell(seam.lifetime), *passes]


def _name(seam: SeamRow) -> str:
    """The seam as a button: it marks the seam in the picture, and opens its fields."""
    name = f"{escape(clean(seam.source))} → {escape(clean(seam.reader))}"
    over = f' <b class="over">over {escape(seam.over)}</b>' if seam.over else ""
    opens = ' aria-expanded="false"' if seam.fields else ""
    return f'<button type="button" class="plain"{opens}>{name}</button>{over}'


def _shape(seam: SeamRow) -> str:
    """The type of its largest field, and how many more there are; of a control seam what it is told."""
    if not seam.fields:
        return f"<small>{escape(clean(', '.join(seam.control)))}</small>"
    largest = max(seam.fields, key=lambda f: (f.mean, f.max))
    more = len(seam.fields) - 1
    return f"<code>{escape(clean(largest.type))}</code>" + (f" <small>+{more}</small>" if more else "")


def owner_table(plan: Plan, priced: Audit, busy: Mapping[str, float]) -> str:
    """Every process: what moves in and out of it, what it holds, and the share of a run that it was busy."""
    ran = priced.steps is not None
    names = ["owner", "has", "in or out", "at most", *(["measured"] if ran else []), "memory"]
    rows = []
    for one in priced.processes:
        sizes = [one.mean, one.max, *([one.measured] if ran else []), one.memory]
        rows.append([Cell(one.owner), Cell(held_by(plan, one.owner)), *map(size, sizes)])
        if busy:
            share = busy.get(one.owner)
            rows[-1].append(UNKNOWN if share is None else Cell(f"{share:.0%}", share))
    return table("owners", [*names, *(["busy"] if busy else [])], rows)


def census_table(found: Census) -> str:
    names = ["state", "owner", "bytes", *BOUNDARIES, "restored by"]
    rows = []
    for state in found.states:
        name = f"{state.name} ({', '.join(state.parts)})" if state.parts else state.name
        marks = [Cell("●" if b in state.crosses else "", float(b in state.crosses)) for b in BOUNDARIES]
        nbytes = Cell(size_text(state.nbytes) + ("" if state.exact else " and more"), float(state.nbytes))
        rows.append([Cell(name), Cell(state.owner), nbytes, *marks, Cell(state.restored)])
    return table("census", names, rows)
