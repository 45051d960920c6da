"""The payload of every seam: predicted from shapes before a run, measured beside it after."""

from flowgraph.plan.measured import Measured
from flowgraph.report.audit.audit import audit
from flowgraph.report.audit.controller import render_naive
from flowgraph.report.audit.export import to_csv
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
from flowgraph.report.audit.spent import measured_over
from flowgraph.report.audit.table import render_table

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
    "measured_over",
    "render_naive",
    "render_table",
    "to_csv",
    "to_json",
]
