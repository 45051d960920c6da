"""The payload of every seam: predicted from shapes before a run, measured beside it after."""

from flowgraph.plan.measured import Measured
from flowgraph.report.audit.audit import Audit, FieldRow, PairRow, SeamRow, Total, audit, to_json
from flowgraph.report.audit.table import render_table, renderable

__all__ = [
    "Audit",
    "FieldRow",
    "Measured",
    "PairRow",
    "SeamRow",
    "Total",
    "audit",
    "render_table",
    "renderable",
    "to_json",
]
