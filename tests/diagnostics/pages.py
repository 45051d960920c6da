"""The pages of docs/codes, taken apart: each has an example that is wrong in one thing, and the same one mended.

A page that ends in a run is run, a page that ends in a check is checked; what it quotes is what is said.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGES = Path(__file__).parents[2] / "docs" / "codes"
SECTIONS = ["What it checks", "Why it matters", "Example", "Use instead"]
FENCE = re.compile(r"^```(?P<kind>\w+)(?: saved as (?P<encoding>\S+))?\n(?P<body>.*?)^```$", re.M | re.S)
# What differs from run to run and from commit to commit: a process, a run directory, a line of a shipped hop.
VARIES = re.compile(r"(?<=pid )\d+|(?<=runs/toy/)[^/]+|(?<=note: hops/)(\w+\.py:\d+:\d+)")


class Case(NamedTuple):
    """A graph, the hops of its own that it uses (mine.py), and how the graph is saved."""

    graph: str
    mine: str
    encoding: str

    def write(self, directory: Path) -> None:
        (directory / "graph.yaml").write_text(self.graph, encoding=self.encoding)
        if self.mine:
            (directory / "mine.py").write_text(self.mine, encoding="utf-8")


class Page(NamedTuple):
    """One page. command: what is said to have been called; text: what it answers; mended: the same without a fault."""

    code: str
    title: str
    sections: dict[str, str]
    command: str
    case: Case
    text: str
    mended: Case


def parse(path: Path) -> Page:
    """Read a page. Under `Use instead`, a graph or a mine.py that is not shown is that of the example."""
    head, *rest = path.read_text(encoding="utf-8").split("\n## ")
    sections = dict(one.split("\n", 1) for one in rest)
    shown = {m["kind"]: m for m in FENCE.finditer(sections["Example"])}
    better = {m["kind"]: m for m in FENCE.finditer(sections["Use instead"])}
    assert better, f"{path.name} mends nothing"
    command = re.search(r"^`flowgraph (.+)` ", sections["Example"], re.M)
    assert command is not None, f"{path.name} names no command"
    return Page(
        code=path.stem,
        title=head.strip(),
        sections=sections,
        command=command[1],
        case=_case(shown),
        text=shown["text"]["body"],
        mended=_case(shown | better),
    )


def _case(fences: dict[str, re.Match[str]]) -> Case:
    mine = fences["python"]["body"] if "python" in fences else ""
    return Case(fences["yaml"]["body"], mine, fences["yaml"]["encoding"] or "utf-8")


def steady(text: str) -> str:
    """A text without what varies."""
    return VARIES.sub("…", text)


ALL = {page.code: page for page in map(parse, sorted(PAGES.glob("*.md")))}
CHECKED = [code for code, page in ALL.items() if page.command.startswith("check")]
RUN = [code for code in ALL if code not in CHECKED]
