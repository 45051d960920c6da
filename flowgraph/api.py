"""flowgraph as a library, for notebooks and CI: load, compile, explain, draw, audit, diff and run, with typed results.

A graph is given by the path of its file, or as what `load` or `compile` made of it. `flowgraph` has these names too:

    >>> import flowgraph
    >>> plan = flowgraph.compile("graphs/quickstart.yaml", {"dims.group": 16})
    >>> flowgraph.draw(plan)                            # a picture, in a notebook
    >>> print(flowgraph.audit(plan))
    >>> done = flowgraph.run("graphs/quickstart.yaml", steps=2)
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flowgraph.errors import CheckError, Diagnostic
from flowgraph.ir.graph import Graph
from flowgraph.passes import pipeline
from flowgraph.passes.check import check
from flowgraph.passes.pipeline import Loaded
from flowgraph.passes.ranks import unrunnable
from flowgraph.passes.rewrite import PASSES
from flowgraph.plan.compile import compile_graph, hold, plans
from flowgraph.plan.measured import Measured, read_measured
from flowgraph.plan.naive import naive_plan
from flowgraph.plan.plan import Plan
from flowgraph.plan.ran import differences, read_busy, read_ran
from flowgraph.report import audit as auditing
from flowgraph.report import diff as differing
from flowgraph.report import draw as drawing
from flowgraph.report import explain as explaining
from flowgraph.report.audit import Audit
from flowgraph.report.diff import Difference
from flowgraph.report.draw import Diagram, Format
from flowgraph.report.explain import Explanation
from flowgraph.report.page import page
from flowgraph.spec.render import render
from flowgraph.spec.revision import home

if TYPE_CHECKING:
    from flowgraph.runtime.run import ExecutorName, Outcome
    from flowgraph.simulator.outcome import Simulated
    from flowgraph.simulator.sweep import Swept

File = str | os.PathLike[str]
Overrides = Mapping[str, Any] | Sequence[str]


def load(
    path: File, overrides: Overrides = (), *, no_pass: Collection[str] = (), model: File | None = None
) -> Loaded:
    """Read and check a graph file. `diagnostics` holds all findings; nothing in the file raises.

    path: of the file, or REV:PATH for the file as it is at a revision of git; hops are always those of the working tree
    overrides: a mapping of path → value, or texts `path=value` as `--set` takes them
    no_pass: passes to leave out when the plan is held against the budgets; "all" for every one
    model: of every engine and learner of the graph, whose numbers are then dims: a built-in name, a directory, a
    config.json, a hub id, or a class of transformers such as `transformers.DeepseekV3Config`

    Modules of your own are found in the working directory and beside the graph, which go to the front of `sys.path`.
    Raises TypeError for overrides of another form.

        >>> loaded = flowgraph.load("graphs/quickstart.yaml", {"run.steps": 3})
        >>> [(d.code, str(d.place)) for d in loaded.diagnostics]
        []
    """
    name = os.fspath(path)
    _importable(os.getcwd(), str(home(name)))
    loaded = pipeline.load(name, _assignments(overrides), None if model is None else os.fspath(model))
    hold(loaded, off=passes_off(no_pass))
    return loaded


def compile(
    graph: File | Loaded | Graph, overrides: Overrides = (), *, no_pass: Collection[str] = ()
) -> Plan:
    """The plan of a graph: a value that `draw`, `audit` and `diff` read and a run executes.

    no_pass: passes to leave out, "all" for every one; none changes a bit of what a run computes
    A graph that is only over a budget (FG502) has a plan, which shows what costs too much; `load` says so, and `run`
    refuses it. Raises CheckError with all findings of any other; ValueError for an unknown pass, and for overrides of
    what is loaded already.

        >>> plan = flowgraph.compile("graphs/quickstart.yaml", ["dims.group=16"])
        >>> plan.dims["group"].max, plan.hops["reward"].owner
        (16, 'trainer')
    """
    return compile_graph(_given(graph, overrides), off=passes_off(no_pass))


def explain(
    graph: File | Loaded | Graph, overrides: Overrides = (), *, no_pass: Collection[str] = ()
) -> Explanation:
    """What every pass makes of a graph, in bytes a step of every seam; its text is the tables of `flowgraph explain`.

    Raises as `compile` does.

        >>> found = flowgraph.explain("graphs/quickstart.yaml")
        >>> [(s.name, round(s.driver)) for s in found.stages]
    """
    return explaining.explain(plans(_given(graph, overrides), off=passes_off(no_pass)))


def draw(
    graph: File | Loaded | Graph | Plan,
    format: Format = "svg",
    *,
    measured: Measured | File | None = None,
    no_pass: Collection[str] = (),
) -> Diagram:
    """The data-flow diagram: a text that a notebook shows as a picture.

    format: "svg", which has a `png()`, "html", "mermaid", "dot" or "table"
    measured: a run's directory, whose bytes stand beside the predicted ones
    What the passes save is shown of a graph, and is not known of a plan.
    Raises as `compile` does; ValueError for another format, and for a run of another graph.

        >>> pathlib.Path("ring.svg").write_text(flowgraph.draw("graphs/quickstart.yaml"))
    """
    plan, priced, naive = _priced(graph, measured, no_pass, naive=format == "html")
    if format == "html":
        busy = {} if measured is None or isinstance(measured, Measured) else read_busy(os.fspath(measured))
        return Diagram(page(plan, priced, naive, busy), format)
    return drawing.draw(plan, priced, format=format)


def audit(
    graph: File | Loaded | Graph | Plan,
    measured: Measured | File | None = None,
    *,
    no_pass: Collection[str] = (),
) -> Audit:
    """What every seam costs in bytes a step, ranked; its text is the table of `flowgraph audit`.

    measured: a run's directory, whose bytes stand beside the predicted ones
    Of a graph it also says what each pass saves, and what a single controller would carry; of a plan neither is known.
    Raises as `compile` does; ValueError for a run of another graph, and for one that measured nothing.

        >>> found = flowgraph.audit("graphs/quickstart.yaml", done.directory)
        >>> [(s.source, s.reader) for s in found.seams if s.exceeds or s.off]
        []
    """
    return _priced(graph, measured, no_pass)[1]


def diff(before: File | Loaded | Graph | Plan, after: File | Loaded | Graph | Plan) -> Difference:
    """What differs between two graphs: settings, hops, ports, bytes a seam, memory an owner. False when nothing does.

    Raises as `compile` does.

        >>> print(flowgraph.diff("HEAD~1:graphs/quickstart.yaml", "graphs/quickstart.yaml"))
        no difference
    """
    return differing.diff(_plan(before), _plan(after))


def run(
    graph: File | Loaded,
    *,
    executor: ExecutorName = "processes",
    runs: File = "runs",
    steps: int | None = None,
    live: bool | None = None,
    overrides: Overrides = (),
    no_pass: Collection[str] = (),
    verify: bool = False,
) -> Outcome:
    """Run a graph to its last step. All about the run goes to `runs/<graph>/<id>/`, the `directory` of the outcome.

    executor: "processes", one an owner, or "inproc", all in this one; steps: short for the override `run.steps`
    live: a live table or plain lines; by the terminal when None
    no_pass: passes to leave out; verify: check every promise and every hop's purity while it runs, which is slower

    Raises CheckError for any finding, over a budget too; ValueError as `compile` does, and for an unknown executor;
    RunError by name, ModelError, or KeyboardInterrupt, and then the workers are gone, shared memory is freed, and what
    was measured is written.

        >>> done = flowgraph.run("graphs/quickstart.yaml", steps=2)
        >>> done.steps
        2
    """
    from flowgraph.runtime.run import EXECUTORS, run_graph

    if executor not in EXECUTORS:
        raise ValueError(f"there is no executor {executor!r}; executors: {', '.join(EXECUTORS)}")
    more = () if steps is None else (f"run.steps={steps}",)
    loaded = _loaded(graph, (*_assignments(overrides), *more), no_pass)
    if loaded is graph:
        loaded = _held(loaded, no_pass)
    whole = _sound(loaded.graph, loaded.diagnostics, loaded.sources)
    _sound(whole, unrunnable(whole), loaded.sources)
    assert loaded.root is not None
    off = passes_off(no_pass)

    def diagram(plan: Plan) -> str:
        return drawing.draw(plan, auditing.audit(plan, stages=list(plans(whole, off=off))))

    return run_graph(
        whole, loaded.root.plain(), executor=executor, runs=os.fspath(runs), live=live, diagram=diagram,
        off=off, verify=verify,
    )  # fmt: skip


def simulate(
    graph: File | Loaded | Graph | Plan, *, steps: int = 200, overrides: Overrides = (), **settings: Any
) -> Simulated:
    """Drive a graph's dispatch, buffer and batch for so many steps of a virtual clock; nothing else of it runs.

    settings: what is assumed of engines, trainer and lengths, as `flowgraph.simulator.settings.Settings` names it. The
    same settings give the same result, bit by bit. Raises as `compile` does; ValueError for settings that don't fit the
    graph; RunError when the folds admit no further step.

        >>> done = flowgraph.simulate("graphs/quickstart.yaml", steps=50, lengths="exponential:4", train_seconds=2.0)
        >>> done.trainer_idle, done.lag.mean
    """
    from flowgraph.simulator.run import simulate_plan
    from flowgraph.simulator.settings import make

    plan = graph if isinstance(graph, Plan) else compile_graph(_given(graph, overrides))
    return simulate_plan(plan, steps, make(settings))


def sweep(
    path: File,
    sweeps: Sequence[str],
    *,
    steps: int = 200,
    overrides: Overrides = (),
    model: File | None = None,
    **settings: Any,
) -> list[Swept]:
    """Simulate a graph file with every combination of values; each with what came of it, or why nothing did.

    sweeps: `path=value,value,…`, or with `;` where values have commas; path is that of an override, `hop.option`, or a
    setting by its name or that of its option
    Raises ValueError for another form, and as `simulate` does when nothing comes of any combination.
    """
    from flowgraph.simulator import sweep as sweeping

    def planned(more: list[str]) -> Plan:
        return compile_graph(_whole(load(path, [*_assignments(overrides), *more], model=model)))

    nodes = _whole(load(path, overrides, model=model)).nodes
    return sweeping.sweep(planned, nodes, sweeps, steps, settings)


# --- what is given, as what is needed ----------------------------------------------------------------------


def _importable(*directories: str) -> None:
    """Put what is not on the module path yet at its front, the first one first; worker processes get the same path."""
    sys.path[:0] = [d for d in dict.fromkeys(directories) if d not in sys.path]
    importlib.invalidate_caches()  # for a module that was written a moment ago


def _assignments(overrides: Overrides) -> list[str]:
    """Overrides as `--set` takes them."""
    if isinstance(overrides, str):
        raise TypeError(f"overrides is the text {overrides!r}; give a list of texts, or a mapping")
    if isinstance(overrides, Mapping):
        return [f"{path}={_yaml(path, value)}" for path, value in overrides.items()]
    return list(overrides)


def _yaml(path: str, value: object) -> str:
    """A value as JSON, which is YAML as well; what can't be printed is escaped as YAML does."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        message = (
            f"the override {path} is no plain value: {error}; give a number, a text, a list or a mapping"
        )
        raise TypeError(message) from None
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def passes_off(names: Collection[str]) -> Collection[str]:
    """Passes to leave out, by name, or one name; "all" means every one. Raises ValueError for a pass that is none."""
    if isinstance(names, str):
        names = (names,)
    if "all" in names:
        return list(PASSES)
    if unknown := [name for name in names if name not in PASSES]:
        raise ValueError(f"there is no pass {unknown[0]!r}; passes: {', '.join(PASSES)}, or all")
    return names


def _none(overrides: Overrides) -> None:
    if overrides:
        raise ValueError("overrides are applied when a file is read; give them to flowgraph.load")


def _given(graph: File | Loaded | Graph, overrides: Overrides) -> Graph:
    """The graph of whatever form it is given in, when nothing keeps it from having a plan."""
    if isinstance(graph, Graph):
        _none(overrides)
        return _sound(graph, check(graph), {})
    return _whole(_loaded(graph, overrides))


def _loaded(graph: File | Loaded, overrides: Overrides, no_pass: Collection[str] = ()) -> Loaded:
    if not isinstance(graph, Loaded):
        return load(graph, overrides, no_pass=no_pass)
    _none(overrides)
    return graph


def _held(loaded: Loaded, no_pass: Collection[str]) -> Loaded:
    """What was loaded, held against its budgets with these passes left out, whichever it was loaded with."""
    found = [d for d in loaded.diagnostics if d.code != "FG502"]
    again = msgspec.structs.replace(loaded, diagnostics=found)
    hold(again, off=passes_off(no_pass))
    return again


def _whole(loaded: Loaded) -> Graph:
    """The graph, when it has a plan."""
    return _sound(loaded.graph, [] if loaded.compiles else loaded.diagnostics, loaded.sources)


def _sound(graph: Graph | None, found: list[Diagnostic], sources: dict[str, str]) -> Graph:
    """The graph, when it has no findings."""
    if found or graph is None:
        raise CheckError(found, render(found, sources))
    return graph


def _plan(graph: File | Loaded | Graph | Plan) -> Plan:
    return graph if isinstance(graph, Plan) else compile(graph)


def _priced(
    graph: File | Loaded | Graph | Plan,
    measured: Measured | File | None,
    no_pass: Collection[str],
    *,
    naive: bool = True,
) -> tuple[Plan, Audit, Plan | None]:
    """A plan, its audit, and if asked for the naive plan; with what only the graph tells when there is one.

    A run's directory brings its own plan: what it measured is held against that, and a graph that has changed since
    is said to have.
    """
    whole = None if isinstance(graph, Plan) else _given(graph, ())
    stages = [] if whole is None else list(plans(whole, off=passes_off(no_pass)))
    plan = graph if isinstance(graph, Plan) else stages[-1][1]
    notes: list[str] = []
    if measured is not None and not isinstance(measured, Measured):
        directory, now = os.fspath(measured), plan
        measured = read_measured(directory, now.graph)
        ran = read_ran(directory, now.graph)
        if found := differences(ran, now):
            plan = msgspec.structs.replace(ran, budgets=now.budgets)
            whole, stages = (None, []) if whole is None else _ran(directory, ran)
            notes = [
                f"the graph or its hops changed since this run ({_some(found)}); priced is the plan that ran"
            ]
    carried = naive_plan(whole) if naive and whole is not None else None
    return plan, auditing.audit(plan, measured, stages=stages, naive=carried, notes=notes), carried


def _ran(directory: str, ran: Plan) -> tuple[Graph | None, list[tuple[str, Plan]]]:
    """The graph of a run and its stages, when the hops that are here now still make the plan that ran."""
    _importable(os.getcwd())
    graph = pipeline.load(os.path.join(directory, "graph.yaml")).graph
    if graph is None or check(graph):
        return None, []
    stages = list(plans(graph, off=[name for name in PASSES if name not in ran.passes]))
    return (None, []) if differences(ran, stages[-1][1]) else (graph, stages)


def _some(names: Sequence[str], shown: int = 3) -> str:
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
