"""parse → resolve → check, over a file. Every finding of every stage is reported at once."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from flowgraph.errors import Diagnostic, Place
from flowgraph.ir.graph import Graph
from flowgraph.passes.check import check
from flowgraph.passes.resolve import resolve
from flowgraph.spec.graphfile import read_graph
from flowgraph.spec.revision import read_text
from flowgraph.spec.source import OPTION, Located, read, set_path

# What is unreadable, unknown, refused, mistyped or circular; whatever else is said of the same place follows from it.
CAUSES = ("FG102", "FG108", "FG109", "FG111", "FG202", "FG207", "FG401")


class Loaded(msgspec.Struct):
    """A graph file, as far as it could be read. sources: file → text, to quote findings from."""

    sources: dict[str, str]
    root: Located | None
    graph: Graph | None
    diagnostics: list[Diagnostic]

    @property
    def compiles(self) -> bool:
        """Whether there is a plan all the same: what is over a budget is known only of one, and explained by it."""
        return self.graph is not None and all(d.code == "FG502" for d in self.diagnostics)


def load(path: str, overrides: Sequence[str] = (), model: str | None = None) -> Loaded:
    """Read and check a graph. Never raises for what is in the file; OSError and such become a finding.

    model: of every engine and learner, as overrides after the others
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        message = f"can't read the graph: {getattr(error, 'strerror', None) or error}"
        help = (
            "save it as UTF-8 text"
            if isinstance(error, UnicodeDecodeError)
            else getattr(error, "help", "give the path of a graph file")
        )
        return Loaded({}, None, None, [Diagnostic("FG100", Place(path, 1, 1), message, help)])
    root, found = read(path, text)
    # The i-th override is line i of the file `--set`.
    options = [" ".join(one.splitlines()) for one in overrides]
    options += [] if root is None or model is None else _models(root, model)
    sources = {path: text, OPTION: "\n".join(options)}
    if root is None:
        return Loaded(sources, None, None, found)
    for number, override in enumerate(options if isinstance(root.value, dict) else (), start=1):
        found += set_path(root, override, number)
    file, more = read_graph(path, root)
    found += more
    graph, more = resolve(file)
    found += more
    found += check(graph)
    return Loaded(sources, root, graph, _settle(found))


def _models(root: Located, model: str) -> list[str]:
    """The overrides that name the model of every engine and learner in the file."""
    top = root.value if isinstance(root.value, dict) else {}
    owners = top["owners"].value if "owners" in top and isinstance(top["owners"].value, dict) else {}
    return [
        f"owners.{name}.{resource}.model={json.dumps(model)}"
        for name, owner in owners.items()
        for resource in ("engine", "learner")
        if isinstance(owner.value, dict) and resource in owner.value
    ]


def _settle(found: list[Diagnostic]) -> list[Diagnostic]:
    """In file order, without what only follows from another finding at the same place."""
    causes = {d.place: d.code for d in sorted(found, key=lambda d: d.code, reverse=True) if d.code in CAUSES}
    kept = {d for d in found if causes.get(d.place, d.code) == d.code}
    return sorted(kept, key=lambda d: (d.place, d.code, d.message))
