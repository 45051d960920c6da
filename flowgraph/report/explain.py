"""explain: what every pass makes of a graph, in bytes a step of every seam, before → after."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from flowgraph.passes.sizes import rows_per_step
from flowgraph.plan.laid import Laid, laid
from flowgraph.plan.plan import Plan
from flowgraph.report.audit.saved import costs, savings
from flowgraph.spec.units import size_text

if TYPE_CHECKING:
    from rich.table import Table

NAME = 24  # characters of a seam that stay on one line, however narrow the table


class Stage(msgspec.Struct, frozen=True):
    """The whole plan after one pass: mean payload a step that is read and that passes through the driver

    memory: of all arenas; firings: messages a step that make a worker do something
    """

    name: str
    read: float
    driver: float
    memory: int
    firings: float


class Change(msgspec.Struct, frozen=True):
    """One seam, before all passes and after: mean bytes a step. passes: those that changed one of them."""

    source: str
    reader: str
    read: tuple[float, float]
    driver: tuple[float, float]
    passes: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True):
    """stages: the source, then each pass; seams: those that carry payload, the ones that save most first.

    learners: what those with `pack: tree` save of a forward pass
    """

    graph: str
    stages: tuple[Stage, ...]
    seams: tuple[Change, ...]
    learners: tuple[Laid, ...] = ()

    def __str__(self) -> str:
        return render(self)


def explain(plans: Iterable[tuple[str, Plan]]) -> Explanation:
    """plans: ("source", the plan without passes), then (pass, the plan after it), as `plan.compile.plans` gives."""
    made = list(plans)
    first, last, saved = costs(made[0][1]), costs(made[-1][1]), savings(made)
    seams = []
    for key, before in first.items():
        after = last.get(key, (0.0, 0.0))
        by = tuple(one.name for one in saved.get(key, ()))
        seams.append(Change(*key, (before[0], after[0]), (before[1], after[1]), by))
    seams.sort(key=lambda s: (s.driver[1] - s.driver[0] + s.read[1] - s.read[0], s.source, s.reader))
    stages = tuple(_stage(name, plan) for name, plan in made)
    return Explanation(made[0][1].graph, stages, tuple(seams), tuple(laid(made[-1][1])))


def _stage(name: str, plan: Plan) -> Stage:
    fires = [h for h in plan.hops.values() if h.kind != "fold" and h.rows and h.heads]
    return Stage(
        name,
        sum(s.mean_bytes for s in plan.seams),
        plan.driver_bytes,
        sum(o.arena_bytes for o in plan.owners.values()),
        sum(rows_per_step(h.rows, plan.dims, "mean") / h.every for h in fires),
    )


def to_json(found: Explanation) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1)


# --- as tables -------------------------------------------------------------------------------------------------


def render(found: Explanation, width: int = 110) -> str:
    """What each pass leaves of the whole, what all of them make of each seam, and what learners need not compute."""
    from rich.console import Console

    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(_stages(found))
        console.print(_seams(found))
        for learner in found.learners:
            console.print(learner.text, highlight=False)
    lines = (line.rstrip() for line in capture.get().splitlines())
    return "\n".join(lines).strip("\n") + "\n"


def _stages(found: Explanation) -> Table:
    table = _table(f"{found.graph}: what every pass changes, mean bytes a step")
    for name in ("", "read by hops", "through the driver", "memory", "firings"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    first, last = found.stages[0], found.stages[-1]
    table.add_row(first.name, *_totals(first), end_section=True)
    for before, after in itertools.pairwise(found.stages):
        sizes = (_change(getattr(before, n), getattr(after, n)) for n in ("read", "driver", "memory"))
        fired = f"{after.firings - before.firings:+g}".replace("-", "−")
        table.add_row(after.name, *sizes, fired if fired != "+0" else "·", end_section=after is last)
    table.add_row("compiled", *_totals(last))
    return table


def _totals(stage: Stage) -> tuple[str, ...]:
    return size_text(stage.read), size_text(stage.driver), size_text(stage.memory), f"{stage.firings:g}"


def _change(before: float, after: float) -> str:
    if abs(after - before) < 0.5:
        return "·"
    return ("−" if after < before else "+") + size_text(abs(after - before))


def _seams(found: Explanation) -> Table:
    table = _table("every seam, mean bytes a step before → after")
    longest = max((len(_name(seam)) for seam in found.seams), default=0)
    table.add_column("seam", min_width=min(longest, NAME), overflow="fold")
    for name in ("read", "through the driver"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("by", overflow="fold")
    for seam in found.seams:
        pairs = (_pair(seam.read), _pair(seam.driver))
        table.add_row(_name(seam), *pairs, ", ".join(seam.passes))
    return table


def _name(seam: Change) -> str:
    return f"{seam.source} → {seam.reader}"


def _pair(pair: tuple[float, float]) -> str:
    before, after = map(size_text, pair)
    return before if before == after else f"{before} → {after}"


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    head = box.SIMPLE_HEAD
    return Table(title=title, title_justify="left", title_style="dim", box=head, pad_edge=False)
