"""flowgraph as a library: what notebooks and CI call, and what they get."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowgraph
from flowgraph.plan.measured import Measured
from flowgraph.report.audit import render_table
from flowgraph.runtime.rundir import RunDir
from tests.unit.graphs import DIMS, RING

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests/runtime/toy.yaml"
BROKEN = (DIMS + "hops:\n" + RING).replace("group: source", "group: sorce").replace("bins: 3", "bins: many")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "ring.yaml"
    path.write_text(f"graph: small\n{BROKEN}")
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> flowgraph.Outcome:
    return flowgraph.run(TOY, executor="inproc", runs=tmp_path_factory.mktemp("runs"), steps=2, live=False)


# --- load and compile --------------------------------------------------------------------------------------


def test_load_keeps_the_findings_and_raises_for_nothing_in_the_file(broken: Path) -> None:
    assert flowgraph.load(TOY).diagnostics == []
    assert [d.code for d in flowgraph.load(broken).diagnostics] == ["FG108", "FG111"]
    assert [d.code for d in flowgraph.load(broken.parent / "none.yaml").diagnostics] == ["FG100"]
    assert [d.code for d in flowgraph.load(broken.parent).diagnostics] == ["FG100"]


def test_compile_raises_all_findings_as_check_shows_them(broken: Path) -> None:
    with pytest.raises(flowgraph.CheckError) as caught:
        flowgraph.compile(broken)
    assert [d.code for d in caught.value.diagnostics] == ["FG108", "FG111"]
    lines = str(caught.value).splitlines()
    assert f"{broken}:7:78: error[FG111] hops.count.with.bins: expected `int`, got `str`" in lines
    assert len([line for line in lines if line.startswith("  help: ")]) == 2
    assert len([line for line in lines if set(line.partition("|")[2].strip()) == {"^"}]) == 2


def test_a_graph_may_be_given_in_any_form_that_it_takes() -> None:
    loaded = flowgraph.load(TOY)
    assert loaded.graph is not None
    plan = flowgraph.compile(str(TOY))
    assert flowgraph.compile(TOY) == flowgraph.compile(loaded) == flowgraph.compile(loaded.graph) == plan
    for form in (str(TOY), loaded, loaded.graph):
        assert flowgraph.audit(form) == flowgraph.audit(TOY)
        assert flowgraph.draw(form) == flowgraph.draw(TOY)
        assert not flowgraph.diff(form, plan)


def test_of_a_plan_alone_it_is_not_known_what_the_passes_saved() -> None:
    plan, found = flowgraph.compile(TOY), flowgraph.audit(TOY)
    alone = flowgraph.audit(plan)
    assert (alone.total, alone.driver, alone.owners) == (found.total, found.driver, found.owners)
    assert {s.before for s in alone.seams} == {None}
    assert alone.before is alone.naive is None
    assert found.before is not None
    assert found.before > found.total.mean
    assert any(s.passes for s in found.seams)
    assert flowgraph.draw(plan) == flowgraph.draw(plan)


def test_a_graph_that_has_findings_is_not_lowered() -> None:
    graph = flowgraph.load(TOY).graph
    assert graph is not None
    graph.nodes["reward"].owner = "nobody"
    with pytest.raises(flowgraph.CheckError, match=r"error\[FG301\]"):
        flowgraph.compile(graph)


def test_a_graph_over_a_budget_has_a_plan_and_does_not_run(tmp_path: Path) -> None:
    over = flowgraph.load(TOY, {"budgets": {"driver": "1 B/step"}})
    assert [d.code for d in over.diagnostics] == ["FG502"]
    assert over.compiles
    within = flowgraph.compile(TOY)
    assert flowgraph.compile(over).hops == within.hops
    priced = flowgraph.audit(over)
    assert [s.over for s in priced.seams].count("driver 1 B/step") == 1
    seams = tuple(msgspec.structs.replace(s, over="") for s in priced.seams)
    assert seams == flowgraph.audit(TOY).seams
    assert flowgraph.explain(over) == flowgraph.explain(TOY)
    assert flowgraph.diff(within, over).budgets
    with pytest.raises(flowgraph.CheckError, match=r"error\[FG502\]"):
        flowgraph.run(over, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_is_held_against_its_budgets_with_the_passes_that_it_leaves_out(tmp_path: Path) -> None:
    budget = {"budgets": {"driver": "1 KB/step"}}
    assert flowgraph.load(TOY, budget).diagnostics == []
    with pytest.raises(flowgraph.CheckError, match="leave defer on"):
        flowgraph.run(TOY, overrides=budget, no_pass=["defer"], runs=tmp_path / "runs")
    loaded = flowgraph.load(TOY, budget)
    with pytest.raises(flowgraph.CheckError, match="leave fold and defer on"):
        flowgraph.run(loaded, no_pass=["all"], runs=tmp_path / "runs")
    assert loaded.diagnostics == []
    assert not (tmp_path / "runs").exists()
    over = flowgraph.load(TOY, {**budget, "run.steps": 1}, no_pass=["defer"])
    assert over.diagnostics
    assert flowgraph.run(over, executor="inproc", runs=tmp_path / "runs", live=False).steps == 1


def test_one_pass_may_be_named_as_a_text() -> None:
    assert flowgraph.compile(TOY, no_pass="fold") == flowgraph.compile(TOY, no_pass=["fold"])
    assert flowgraph.compile(TOY, no_pass="all") == flowgraph.compile(TOY, no_pass=["all"])
    with pytest.raises(ValueError, match="there is no pass 'folds'"):
        flowgraph.compile(TOY, no_pass="folds")


def test_an_executor_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no executor 'thread'; executors: processes, inproc"):
        flowgraph.run(TOY, executor="thread", runs=tmp_path / "runs")  # type: ignore[arg-type]
    assert not (tmp_path / "runs").exists()


# --- overrides ---------------------------------------------------------------------------------------------


def test_overrides_are_a_mapping_or_the_texts_of_set() -> None:
    by_text = flowgraph.compile(TOY, ["run.steps=9", "hops.rollout.with={jitter: 0.5}", "run.show=[]"])
    by_value = flowgraph.compile(TOY, {"run.steps": 9, "hops.rollout.with": {"jitter": 0.5}, "run.show": []})
    assert by_text == by_value
    assert (by_value.run.steps, by_value.run.show) == (9, [])
    assert by_value.hops["rollout"].config == {"jitter": 0.5}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(VALUES)
def test_any_plain_value_arrives_as_it_is(value: Any) -> None:
    root = flowgraph.load(TOY, {"doc": value}).root
    assert root is not None
    assert repr(root.plain()["doc"]) == repr(value)


def test_an_override_of_another_form_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"overrides is the text 'run.steps=9'; give a list"):
        flowgraph.load(TOY, "run.steps=9")
    with pytest.raises(TypeError, match=r"the override run.seed is no plain value: .*set.*; give a number"):
        flowgraph.load(TOY, {"run.seed": {1}})


def test_overrides_come_too_late_for_what_is_loaded() -> None:
    loaded = flowgraph.load(TOY)
    late: list[Callable[[], object]] = [
        lambda: flowgraph.compile(loaded, ["run.steps=1"]),
        lambda: flowgraph.compile(loaded.graph or "", {"run.steps": 1}),
        lambda: flowgraph.run(loaded, steps=1),
    ]
    for call in late:
        with pytest.raises(ValueError, match=r"when a file is read; give them to flowgraph.load"):
            call()


# --- reports -----------------------------------------------------------------------------------------------


def test_a_notebook_shows_a_diagram_as_a_picture() -> None:
    svg, mermaid = flowgraph.draw(TOY), flowgraph.draw(TOY, "mermaid")
    assert svg.startswith("<svg")
    assert (svg._repr_svg_(), svg._repr_markdown_()) == (svg, None)
    assert (mermaid._repr_svg_(), mermaid._repr_markdown_()) == (None, f"```mermaid\n{mermaid}```\n")
    assert repr(mermaid) == f"<Diagram: mermaid, {len(mermaid):,} characters>"
    for same in (copy.deepcopy(svg), pickle.loads(pickle.dumps(svg))):
        assert same == svg
        assert same.kind == "svg"
    with pytest.raises(ValueError, match="no format 'png'; there are svg, mermaid"):
        flowgraph.draw(TOY, "png")  # type: ignore[arg-type]


def test_the_text_of_an_audit_is_its_table() -> None:
    found = flowgraph.audit(TOY)
    assert str(found) == render_table(found)
    assert "advantage → train" in str(found)


def test_what_a_run_measured_stands_beside_what_was_predicted(done: flowgraph.Outcome) -> None:
    found = flowgraph.audit(TOY, done.directory)
    assert found.steps == 2
    weights = next(s for s in found.seams if (s.source, s.reader) == ("train", "sync"))
    assert weights.measured is not None
    assert 0 < weights.measured <= weights.max
    measured = msgspec.json.decode(
        (Path(done.directory) / "seams.json").read_bytes(), type=flowgraph.Measured
    )
    assert flowgraph.audit(TOY, measured) == found
    assert (
        flowgraph.draw(TOY, measured=done.directory)
        == flowgraph.draw(TOY, measured=measured)
        != flowgraph.draw(TOY)
    )


def test_a_run_of_another_graph_or_none_at_all_is_refused(done: flowgraph.Outcome, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a run of the graph toy, not of quickstart"):
        flowgraph.audit(ROOT / "graphs/quickstart.yaml", done.directory)
    with pytest.raises(ValueError, match=r"seams.json holds no measured seams: .*No such file"):
        flowgraph.audit(TOY, tmp_path)
    run_dir = RunDir(tmp_path, "toy")
    run_dir.graph({}, flowgraph.compile(TOY))
    run_dir.close()
    with pytest.raises(ValueError, match=r"holds no measured seams: .*seams.json"):
        flowgraph.draw(TOY, measured=run_dir.path)
    (run_dir.path / "seams.json").write_bytes(msgspec.json.encode(Measured(0, {}, {}, 0)))
    for report in (flowgraph.audit, lambda plan, run: flowgraph.draw(plan, measured=run)):
        with pytest.raises(ValueError, match="is a run without a step, so it measured nothing"):
            report(TOY, run_dir.path)


# --- run ---------------------------------------------------------------------------------------------------


def test_a_run_says_where_everything_is(done: flowgraph.Outcome) -> None:
    assert done.steps == 2
    names = {path.name for path in Path(done.directory).iterdir()}
    assert names >= {"graph.yaml", "plan.json", "metrics.jsonl", "seams.json", "summary.json", "ring.svg"}
    loaded = flowgraph.load(TOY, {"run.steps": 2})
    assert Path(done.directory, "ring.svg").read_text() == flowgraph.draw(loaded)
    assert flowgraph.compile(Path(done.directory, "graph.yaml")).run.steps == 2


def test_a_graph_with_findings_does_not_run(broken: Path, tmp_path: Path) -> None:
    with pytest.raises(flowgraph.CheckError):
        flowgraph.run(broken, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


MINE = """
import numpy as np
from jaxtyping import Int64
from flowgraph import Array, Latest, hop
from typing import Annotated

@hop(owner="rollout", lifetime="version")
def publish(batch_id: Int64[Array, ""]) -> Annotated[int, Latest(initial=0)]:
    return int(batch_id) + 1
"""
NOTEBOOK = """
import sys, flowgraph
for path in ("there/toy.yaml", "there/toy.yaml"):
    loaded = flowgraph.load(path, {"hops.sync": {"use": "my_hops.publish", "in": {"batch_id": "train"}}})
print([d.message for d in loaded.diagnostics])
print([sys.path.count(directory) for directory in sys.argv[1:]])
print(flowgraph.run(loaded, executor="processes", live=False).steps)
"""


def test_hops_beside_the_graph_are_found_wherever_it_is_called_from(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "my_hops.py").write_text(MINE)
    (there / "toy.yaml").write_text(TOY.read_text().replace("steps: 6", "steps: 2"))
    code = f"import sys; sys.path.append({str(ROOT)!r})\n{NOTEBOOK}"
    command = [sys.executable, "-c", code, str(tmp_path), str(there)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert lines[:2] == ["[]", "[1, 1]"]
    assert lines[-1] == "2"


# --- the names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["load", "compile", "explain", "draw", "audit", "diff", "run"])
def test_every_function_has_types_errors_and_an_example(name: str) -> None:
    function = getattr(flowgraph, name)
    doc = function.__doc__
    assert "Raises" in doc
    assert ">>> " in doc
    annotations = typing.cast("dict[str, str]", function.__annotations__)
    assert "return" in annotations
    assert "Any" not in annotations.values()


def test_a_diff_imports_neither_torch_nor_networkx_nor_rich() -> None:
    code = f"""
import sys, flowgraph
assert flowgraph.diff({str(TOY)!r}, flowgraph.compile({str(TOY)!r}, {{"dims.group": 3}}))
print([m for m in ("torch", "networkx", "transformers", "rich") if m in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_where_a_loop_runs_processes_work_and_inproc_is_refused_by_name(tmp_path: Path) -> None:
    """As in a notebook, whose cells run in an event loop."""

    async def cell(executor: str) -> int:
        return flowgraph.run(TOY, steps=1, executor=executor, runs=tmp_path, live=False).steps  # type: ignore[arg-type]

    assert asyncio.run(cell("processes")) == 1
    with pytest.raises(flowgraph.RunError, match=r"one runs here already.*\n.*processes"):
        asyncio.run(cell("inproc"))
