"""Graphs of the small hops of tests/diagnostics, for the compiler's tests."""

from __future__ import annotations

from pathlib import Path

from flowgraph.errors import Place
from flowgraph.ir.graph import Graph
from flowgraph.passes.pipeline import Loaded, load

SMALL = "tests.diagnostics.small"
RING = f"""\
  source: {{use: {SMALL}.source}}
  split: {{use: {SMALL}.split_by_version, in: {{group: source, version: {{from: sync, delay: 1, max_lag: 1}}}}}}
  batch: {{use: {SMALL}.batch, in: {{trajectory: split}}}}
  count: {{use: {SMALL}.count, in: {{key: batch}}, with: {{bins: 3}}}}
  total: {{use: {SMALL}.total, in: {{score: count}}}}
  sync: {{use: {SMALL}.publish, in: {{batch_id: total}}}}
"""
DIMS = "dims: {group: 2, sample: 4, prompt: {mean: 8, max: 16}}\n"


def loaded(
    tmp_path: Path, hops: str = RING, dims: str = DIMS, top: str = "", overrides: tuple[str, ...] = ()
) -> Loaded:
    path = tmp_path / "graph.yaml"
    path.write_text(f"graph: small\n{dims}{top}hops:\n{hops}")
    return load(str(path), overrides)


def good(tmp_path: Path, hops: str = RING, dims: str = DIMS, top: str = "") -> Graph:
    result = loaded(tmp_path, hops, dims, top)
    assert not result.diagnostics, result.diagnostics
    assert result.graph is not None
    return result.graph


def codes(tmp_path: Path, hops: str = RING, dims: str = DIMS, top: str = "") -> list[str]:
    """Each finding as its code and the text that it underlines."""
    result = loaded(tmp_path, hops, dims, top)
    return [f"{d.code} {span(result.sources[d.place.file], d.place)}" for d in result.diagnostics]


def span(text: str, place: Place) -> str:
    start = place.column - 1
    return text.splitlines()[place.line - 1][start : start + place.width]
