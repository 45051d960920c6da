"""What differs between two plans: hops, ports, bytes a seam and memory an owner."""

from flowgraph.report.diff.diff import Change, Crossing, Difference, HopFacts, PortFacts, diff, to_json
from flowgraph.report.diff.text import render_text

__all__ = [
    "Change",
    "Crossing",
    "Difference",
    "HopFacts",
    "PortFacts",
    "diff",
    "render_text",
    "to_json",
]
