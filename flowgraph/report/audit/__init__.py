"""The payload of every seam: predicted from shapes before a run, measured beside it after."""

from flowgraph.plan.measured import Measured
from flowgraph.report.audit.audit import audit
from flowgraph.report.audit.rows import (
    Audit,
    Carried,
    FieldRow,
    OwnerRow,
    PairRow,
    Saving,
    SeamRow,
    Total,
    to_json,
)
from flowgraph.report.audit.table import render_table, renderable

__all__ = [
    "Audit",
    "Carried",
    "FieldRow",
    "Measured",
    "OwnerRow",
    "PairRow",
    "Saving",
    "SeamRow",
    "Total",
    "audit",
    "render_table",
    "renderable",
    "to_json",
]
