"""The state census: everything of a ring that has to be kept right, and the boundaries that it crosses."""

from flowgraph.report.census.census import Census, State, census, to_json
from flowgraph.report.census.table import render_table

__all__ = ["Census", "State", "census", "render_table", "to_json"]
