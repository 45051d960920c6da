"""compile: a checked graph through the passes into a plan; and, when asked for, what every pass made of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from flowgraph.errors import CheckError, FlowgraphError
from flowgraph.ir.graph import Graph
from flowgraph.passes.pipeline import Loaded, load
from flowgraph.passes.rewrite import PASSES, SOURCE, rewrite, stages
from flowgraph.plan.budgets import check_budgets
from flowgraph.plan.lower import lower
from flowgraph.plan.plan import Plan
from flowgraph.plan.text import plan_text

DUMP = "FLOWGRAPH_DUMP"


def compile_graph(graph: Graph, *, off: Collection[str] = (), verify: bool = False) -> Plan:
    """The plan of a graph without findings. off: passes to leave out; verify: check every promise while it runs.

    With FLOWGRAPH_DUMP=DIR in the environment, DIR gets the plan's text after every pass, one file each.
    Raises FlowgraphError when it can't be written.
    """
    if directory := os.environ.get(DUMP):
        _dump(Path(directory), plans(graph, off=off))
    on = [name for name in PASSES if name not in off]
    return lower(rewrite(graph, off), on, verify=verify)


def plans(graph: Graph, *, off: Collection[str] = ()) -> Iterator[tuple[str, Plan]]:
    """("source", the plan without any pass), then the plan after each pass that is on."""
    passes: list[str] = []
    before, plan = graph, lower(graph)
    for name, after in stages(graph, off):
        passes += [name] if name != SOURCE else []
        plan = (
            msgspec.structs.replace(plan, passes=tuple(passes))
            if _same(before, after)
            else lower(after, passes)
        )
        before = after
        yield name, plan


def _same(before: Graph, after: Graph) -> bool:
    """Whether a pass changed nothing: what it leaves alone it hands on as it was."""
    nodes = zip(before.nodes.values(), after.nodes.values(), strict=True)
    return before.mapped == after.mapped and all(a is b for a, b in nodes)


def compile_file(path: str, overrides: Sequence[str] = (), *, off: Collection[str] = ()) -> Plan:
    """The plan of a graph file. Raises CheckError with all findings."""
    loaded = load(path, overrides)
    plan = finish(loaded, off=off)
    if plan is None or loaded.diagnostics:
        raise CheckError(loaded.diagnostics)
    return plan


def finish(loaded: Loaded, *, off: Collection[str] = ()) -> Plan | None:
    """The plan of a graph without findings; what only the plan shows joins them. None when there are some already.

    A budget that can't be hides no other: what the rest of the graph costs is known all the same.
    """
    if loaded.graph is None or any(d.code != "FG503" for d in loaded.diagnostics):
        return None
    plan = compile_graph(loaded.graph, off=off)
    file, unsound = loaded.graph.file, {d.place for d in loaded.diagnostics}
    sound = [b for b in file.budgets if not {b.at, b.place} & unsound]
    found = [*loaded.diagnostics, *check_budgets(sound, plan, loaded.graph)]
    loaded.diagnostics = sorted(found, key=lambda d: (d.place, d.code, d.message))
    return None if unsound else plan


def hold(loaded: Loaded, *, off: Collection[str] = ()) -> None:
    """`finish`, when something comes of it: the graph has budgets, or a dump is asked for."""
    if os.environ.get(DUMP) or (loaded.graph is not None and loaded.graph.file.budgets):
        finish(loaded, off=off)


def _dump(directory: Path, made: Iterator[tuple[str, Plan]]) -> None:
    """One file a stage. Those of an earlier dump go first: a pass that is off now would seem to be on."""
    texts = [(name, plan_text(plan)) for name, plan in made]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (SOURCE, *PASSES):
            for stale in directory.glob(f"[0-9][0-9]-{name}.txt"):
                stale.unlink()
        for number, (name, text) in enumerate(texts):
            (directory / f"{number:02d}-{name}.txt").write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"{error.strerror}: {error.filename}"
        text = f"{DUMP}={directory} can't be written ({why}); give a directory that can, or unset {DUMP}"
        raise FlowgraphError(text) from None
