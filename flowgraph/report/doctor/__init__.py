"""What this machine and its Python have of what flowgraph needs; what SGLang needs on top. Imports no torch."""

from flowgraph.report.doctor.checks import Report, check_machine, check_sglang, to_json
from flowgraph.report.doctor.table import render

__all__ = ["Report", "check_machine", "check_sglang", "render", "to_json"]
