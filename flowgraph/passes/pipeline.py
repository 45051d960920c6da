"""parse → resolve → check → lower, over a file. Every finding of every stage is reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from flowgraph.errors import CheckError, Diagnostic, Place
from flowgraph.ir.graph import Graph
from flowgraph.passes.check import check
from flowgraph.passes.resolve import resolve
from flowgraph.plan.lower import lower
from flowgraph.plan.plan import Plan
from flowgraph.spec.graphfile import read_graph
from flowgraph.spec.source import Located, read, set_path


class Loaded(msgspec.Struct):
    """A graph file, as far as it could be read. sources: file → text, to quote findings from."""

    sources: dict[str, str]
    root: Located | None
    graph: Graph | None
    diagnostics: list[Diagnostic]


def load(path: str, overrides: Sequence[str] = ()) -> Loaded:
    """Read and check a graph. Never raises for what is in the file; OSError and such become a finding."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"can't read the graph: {getattr(error, 'strerror', None) or error}"
        return Loaded({}, None, None, [Diagnostic("FG100", Place(path, 1, 1), message, "give the path of a graph file")])
    sources = {path: text}
    root, found = read(path, text)
    if root is None:
        return Loaded(sources, None, None, found)
    for override in overrides:
        problem = set_path(root, override)
        if problem is not None:
            found.append(problem)
    file, more = read_graph(path, root)
    found += more
    graph, more = resolve(file)
    found += more
    found += check(graph)
    return Loaded(sources, root, graph, sorted(found, key=lambda d: (d.place, d.code)))


def compile_file(path: str, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a graph file. Raises CheckError with all findings."""
    loaded = load(path, overrides)
    if loaded.diagnostics or loaded.graph is None:
        raise CheckError(loaded.diagnostics)
    return lower(loaded.graph)
