"""The pages of docs/codes, taken apart: each has an example that is wrong in one thing, and the same one mended.

To add a page: write it with an empty ```text fence, then run `python -m tests.diagnostics.pages FG231` in the project's
directory, which fills in what is really said. A graph may use hops that the page shows, as the module `mine`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from flowgraph.errors import RunError
from flowgraph.passes.pipeline import load
from flowgraph.passes.ranks import unrunnable
from flowgraph.plan.compile import finish
from flowgraph.runtime.run import ExecutorName, run_graph
from flowgraph.spec.render import render

PAGES = Path(__file__).parents[2] / "docs" / "codes"
SECTIONS = ["What it checks", "Why it matters", "Example", "Use instead"]
FENCE = re.compile(r"^```(?P<kind>\w+)(?: saved as (?P<encoding>\S+))?\n(?P<body>.*?)^```$", re.M | re.S)
# What differs from run to run, from commit to commit and between machines: a process, a run directory, a line of a
# shipped hop, the memory that is free.
VARIES = re.compile(
    r"(?<=pid )\d+|(?<=runs/toy/)[^/]+|(?<=note: hops/)\w+\.py:\d+:\d+|(?<=, and )\S+ \wB(?= of memory are available)"
)


class Case(NamedTuple):
    """A graph, how it is saved, the hops of its own that it uses (mine.py), and the command that is given."""

    graph: str
    encoding: str
    mine: str
    command: str

    def answer(self) -> str:
        """What the command says, of files in the current directory; "" when it finds nothing, or runs to its end."""
        Path("graph.yaml").write_text(self.graph, encoding=self.encoding)
        Path("mine.py").write_text(self.mine, encoding="utf-8")
        loaded = load("graph.yaml")
        finish(loaded)
        if loaded.diagnostics or self.command.startswith("check"):
            return render(loaded.diagnostics, loaded.sources)
        assert loaded.graph is not None
        assert loaded.root is not None
        if found := unrunnable(loaded.graph):
            return render(found, loaded.sources)
        executor: ExecutorName = "inproc" if "inproc" in self.command else "processes"
        try:
            done = run_graph(
                loaded.graph,
                loaded.root.plain(),
                executor=executor,
                live=False,
                verify="--verify" in self.command,
            )
        except RunError as error:
            return str(error)
        assert done.steps == loaded.graph.file.run.steps, f"the run ended after {done.steps} steps"
        return ""


class Page(NamedTuple):
    """One page. text: what the example is said to answer; mended: the example without its fault."""

    code: str
    title: str
    sections: dict[str, str]
    example: Case
    text: str
    mended: Case


def parse(path: Path) -> Page:
    """Read a page. Under `Use instead`, a graph or a mine.py that is not shown is that of the example."""
    head, *rest = path.read_text(encoding="utf-8").split("\n## ")
    sections = dict(one.split("\n", 1) for one in rest)
    shown = {m["kind"]: m for m in FENCE.finditer(sections["Example"])}
    better = {m["kind"]: m for m in FENCE.finditer(sections["Use instead"])}
    command = re.search(r"^`flowgraph (.+)` ", sections["Example"], re.M)
    assert better, f"{path.name} mends nothing"
    assert command is not None, f"{path.name} names no command"
    example, mended = (_case(fences, command[1]) for fences in (shown, shown | better))
    return Page(path.stem, head.strip(), sections, example, shown["text"]["body"], mended)


def _case(fences: dict[str, re.Match[str]], command: str) -> Case:
    mine = fences["python"]["body"] if "python" in fences else ""
    return Case(fences["yaml"]["body"], fences["yaml"]["encoding"] or "utf-8", mine, command)


def steady(text: str) -> str:
    """A text without what varies."""
    return VARIES.sub("…", text)


def fill(path: Path) -> None:
    """Write into a page what its example really says. Call it in a directory of its own."""
    answer = parse(path).example.answer()
    text = path.read_text(encoding="utf-8")
    filled = re.sub(r"^```text\n.*?^```$", lambda _: f"```text\n{answer}\n```", text, flags=re.M | re.S)
    path.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    for code in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            sys.path[:0] = [directory]
            fill(PAGES / f"{code}.md")
            sys.modules.pop("mine", None)
            os.chdir(PAGES)
