"""The page of a plan: its pictures, a table of its seams, its hops and its states, in one HTML file."""

from flowgraph.report.page.page import page

__all__ = ["page"]
