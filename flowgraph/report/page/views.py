"""What the page can show: the graph as a single controller carries it or compiled, as predicted or as measured."""

from __future__ import annotations

import msgspec

from flowgraph.plan.plan import Plan
from flowgraph.report.audit import Audit, SeamRow, audit
from flowgraph.report.audit.rows import FieldRow
from flowgraph.spec.units import counted

NAIVE = "as a single controller carries it: padded, whole, and all of it through the controller; weights go past it"


class View(msgspec.Struct, frozen=True):
    """One state of the toggles. seams: the rows of its table; total, driver: bytes a step, None where unknown."""

    plan_as: str  # naive or compiled
    bytes_as: str  # predicted or measured
    plan: Plan
    audit: Audit
    seams: tuple[SeamRow, ...]
    total: float | None
    driver: float | None
    said: str

    @property
    def key(self) -> str:
        return f"{self.plan_as}-{self.bytes_as}"


def views(plan: Plan, priced: Audit, naive: Plan | None) -> list[View]:
    """Those that there are: naive only of a graph, measured only after a run. A run measures the compiled plan."""
    predicted = without_run(priced)
    said = "compiled, mean bytes a step before the run"
    sums = predicted.total.mean, predicted.driver.mean
    found = [View("compiled", "predicted", plan, predicted, predicted.seams, *sums, said)]
    if naive is not None and priced.naive is not None:
        carried = audit(naive)
        sums = carried.total.mean, carried.driver.mean
        found.append(View("naive", "predicted", naive, carried, carried.seams, *sums, NAIVE))
    if priced.steps is not None:
        said = f"compiled, bytes a step as measured over {counted(priced.steps, 'step')}"
        read = priced.total.measured, priced.driver.measured
        found.append(View("compiled", "measured", plan, priced, priced.seams, *read, said))
    return found


def without_run(priced: Audit) -> Audit:
    """The audit as it is before a run."""
    seams = tuple(
        msgspec.structs.replace(
            seam, fields=tuple(_field(f) for f in seam.fields), measured=None, difference=None, exceeds=False,
            expected=None, declared=None,
        )
        for seam in priced.seams
    )  # fmt: skip
    return msgspec.structs.replace(
        priced, seams=seams, steps=None, control_bytes=None,
        total=msgspec.structs.replace(priced.total, measured=None),
        driver=msgspec.structs.replace(priced.driver, measured=None),
        owners=tuple(msgspec.structs.replace(one, measured=None) for one in priced.owners),
        processes=tuple(msgspec.structs.replace(one, measured=None) for one in priced.processes),
    )  # fmt: skip


def _field(field: FieldRow) -> FieldRow:
    return msgspec.structs.replace(field, measured=None, exceeds=False, expected=None)
