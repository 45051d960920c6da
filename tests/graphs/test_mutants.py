"""Whatever is in a graph file, the compiler answers with positioned findings or a plan, and never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgraph.passes.pipeline import Loaded, load
from flowgraph.plan.compile import finish
from flowgraph.plan.plan import from_json, to_json
from flowgraph.spec.codes import CODES
from flowgraph.spec.render import render
from tests.graphs.mutants import mutants

ROOT = Path(__file__).parents[2]
GRAPHS = {name: (ROOT / name).read_text() for name in ("graphs/quickstart.yaml", "tests/runtime/toy.yaml")}


def answer(path: Path, text: str, overrides: tuple[str, ...] = ()) -> Loaded:
    """Load a file, and hold the answer to its promises."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    loaded = load(str(path), overrides)
    plan = finish(loaded)
    if plan is not None:
        assert loaded.graph is not None
        assert not loaded.graph.broken
        assert from_json(to_json(plan)) == plan
    if loaded.graph is not None and loaded.graph.broken:
        assert loaded.diagnostics, (
            f"{sorted(loaded.graph.broken)} can't be resolved, and nothing is said of them"
        )
    for d in loaded.diagnostics:
        assert d.code in CODES
        assert d.message
        assert d.help
        assert "Located(" not in d.message + d.help
        assert d.place.file in (str(path), "--set")
        lines = [*loaded.sources.get(d.place.file, "").splitlines(), ""]
        assert 1 <= d.place.line <= len(lines)
        assert 1 <= d.place.column <= len(lines[d.place.line - 1]) + 1
    assert len({(d.place, d.code, d.message) for d in loaded.diagnostics}) == len(loaded.diagnostics)
    render(loaded.diagnostics, loaded.sources)
    return loaded


@pytest.mark.parametrize("name", GRAPHS)
def test_an_edited_graph_has_findings_or_compiles(name: str, tmp_path: Path) -> None:
    outcomes = set()
    for number, (edit, text) in enumerate(mutants(GRAPHS[name], seed=0, count=250)):
        try:
            outcomes.add(bool(answer(tmp_path / "graph.yaml", text).diagnostics))
        except Exception as error:
            error.add_note(f"mutant {number}, {edit}:\n{text}")
            raise
    assert outcomes == {True, False}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
KEYS = (
    st.sampled_from(["graph", "dims", "hops", "owners", "run", "use", "in", "with", "from", "batch", "max"])
    | st.text()
)
USES = st.sampled_from(
    ["hops.batch.oldest_first", "hops.buffer.ready", "hops.dispatch.watermark", "hops.loss", "tests"]
)
TREES = st.recursive(
    SCALARS | USES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
HOPS = st.dictionaries(
    KEYS, st.fixed_dictionaries({"use": USES | SCALARS}, optional={"in": TREES, "with": TREES})
)


@given(
    tree=TREES | st.fixed_dictionaries({"graph": TREES, "hops": HOPS}, optional={"dims": TREES, "run": TREES})
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_yaml_has_findings_or_compiles(tree: object, tmp_path: Path) -> None:
    answer(tmp_path / "graph.yaml", yaml.safe_dump(tree, allow_unicode=True))


@given(text=st.text())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_has_findings_or_compiles(text: str, tmp_path: Path) -> None:
    answer(tmp_path / "graph.yaml", text)


@given(
    overrides=st.lists(
        st.text(max_size=20) | st.from_regex(r"[a-z.\"']{1,12}=.{0,8}", fullmatch=True), max_size=3
    )
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_override_has_findings_or_compiles(overrides: list[str], tmp_path: Path) -> None:
    answer(tmp_path / "graph.yaml", GRAPHS["tests/runtime/toy.yaml"], tuple(overrides))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000,
        "{a: " * 3000,
        "&a [*a]",
        "graph: &a {hops: *a}",
        "\ufeffgraph: x",
        "a: b\n---\nc: d",
        "\x00",
        "graph: \x85",
    ],
    ids=[
        "brackets",
        "braces",
        "recursive",
        "recursive mapping",
        "byte order mark",
        "two documents",
        "null",
        "next line",
    ],
)
def test_a_hostile_file_has_findings(text: str, tmp_path: Path) -> None:
    assert answer(tmp_path / "graph.yaml", text).diagnostics


@pytest.mark.parametrize(
    "override",
    [
        'hops.reward.in.tokens=""',
        "hops.reward.in.tokens=",
        'hops.reward.in.tokens={from: ""}',
        'hops.reward.in.tokens={from: "", every: 2}',
        "hops.reward.in.tokens=batch.",
        "hops.reward.in.tokens=.tokens",
        'hops.reward.use=""',
        'hops.reward.owner=""',
    ],
)
def test_an_empty_name_is_a_finding_where_it_stands(override: str, tmp_path: Path) -> None:
    found = answer(tmp_path / "graph.yaml", GRAPHS["tests/runtime/toy.yaml"], (override,)).diagnostics
    assert [(d.code, d.place.file) for d in found] == [("FG106", "--set")]


@pytest.mark.parametrize("name", ["", "no\0name", "/", "missing.yaml"])
def test_a_file_that_is_not_there_is_a_finding(name: str) -> None:
    assert [d.code for d in load(name).diagnostics] == ["FG100"]


def test_a_file_that_is_no_utf8_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "graph.yaml").write_bytes(b"graph: \xff\xfe")
    assert [d.code for d in load(str(tmp_path / "graph.yaml")).diagnostics] == ["FG100"]
