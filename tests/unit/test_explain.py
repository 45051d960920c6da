"""flowgraph explain: what every pass saves, the text of every stage, the pages of codes, and one file a pass."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

import flowgraph
from flowgraph.cli import main
from flowgraph.ir.text import graph_text
from flowgraph.passes.pipeline import load
from flowgraph.passes.rates import rates
from flowgraph.passes.rewrite import PASSES, rewrite
from flowgraph.plan.compile import compile_file
from flowgraph.plan.plan import Plan, from_json
from flowgraph.plan.text import plan_text
from flowgraph.report.explain import Change, Explanation, Stage, render
from flowgraph.spec.codes import CODES, page

ROOT = Path(__file__).parents[2]
TOY, QUICKSTART = str(ROOT / "tests/runtime/toy.yaml"), str(ROOT / "graphs/quickstart.yaml")
NAMES = tuple(PASSES)


@pytest.fixture(scope="module")
def toy() -> Explanation:
    return flowgraph.explain(TOY)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def of(found: Explanation, source: str, reader: str) -> Change:
    return next(s for s in found.seams if (s.source, s.reader) == (source, reader))


def after(number: int) -> Plan:
    """The toy's plan when only the first so many passes are on."""
    return compile_file(TOY, off=NAMES[number:])


# --- what every pass saves ---------------------------------------------------------------------------------


def test_a_stage_for_the_source_and_one_for_every_pass_that_is_on(toy: Explanation) -> None:
    assert [s.name for s in toy.stages] == ["source", *NAMES]
    some = flowgraph.explain(TOY, no_pass=["defer", "fold"])
    assert [s.name for s in some.stages] == ["source", "project", "encode", "narrow", "place", "fuse"]
    none = flowgraph.explain(TOY, no_pass=["all"])
    assert none.stages == toy.stages[:1]
    assert all(s.passes == () and s.read[0] == s.read[1] for s in none.seams)


def test_the_totals_of_a_stage_are_those_of_its_plan(toy: Explanation) -> None:
    for number, stage in enumerate(toy.stages):
        plan = after(number)
        assert stage.read == sum(s.mean_bytes for s in plan.seams)
        assert stage.driver == plan.driver_bytes
        assert stage.memory == sum(o.arena_bytes for o in plan.owners.values())
    assert toy.stages[-1].driver == flowgraph.audit(TOY).driver.mean


def test_the_seams_sum_to_the_first_stage_and_the_last(toy: Explanation) -> None:
    for i, stage in ((0, toy.stages[0]), (1, toy.stages[-1])):
        assert sum(s.read[i] for s in toy.seams) == stage.read
        assert sum(s.driver[i] for s in toy.seams) == stage.driver


def test_firings_are_messages_and_a_fused_group_gets_one(toy: Explanation) -> None:
    fired = {s.name: s.firings for s in toy.stages}
    # six trajectories are sampled; reward, advantage, train and sync fire once a step, then three of them as one
    assert fired == dict.fromkeys(["source", *NAMES], 6 + 4) | {"fuse": 6 + 2}


def test_a_seam_names_the_passes_that_changed_its_bytes_by_hand(toy: Explanation) -> None:
    weights, batch_id = 2.5 * 8, 8  # f64[prompt]; relayed in by its writer, and read out by another process
    assert of(toy, "train", "sync") == Change(
        "train", "sync", (weights + batch_id,) * 2, (2 * weights + batch_id, batch_id), ("defer",)
    )
    scores = 12 * (4 + 1)  # 12 leaves of a float and a bool
    assert of(toy, "reward", "advantage") == Change(
        "reward", "advantage", (scores, 0), (2 * scores, 0), ("defer", "fuse")
    )
    assert of(toy, "rollout", "nobody") == Change(
        "rollout", "nobody", (0, 0), (6 * 2 * 4.5 * 4, 0), ("project",)
    )
    prompt, key = 6 * 2.5 * 4, 6 * 8
    assert of(toy, "dispatch", "rollout").driver == (prompt + key,) * 2
    assert of(toy, "dispatch", "rollout").passes == ()


def test_a_pass_is_named_exactly_where_the_plan_after_it_differs(toy: Explanation) -> None:
    bills = []
    for number in range(len(NAMES) + 1):
        plan = after(number)
        bill = {(s.source, s.reader): (s.mean_bytes, sum(f.driver[0] for f in s.fields)) for s in plan.seams}
        bills.append(bill | {(hop, "nobody"): (0.0, mean) for hop, (mean, _) in plan.unread.items()})
    for seam in toy.seams:
        key = seam.source, seam.reader
        prices = [bill.get(key, (0.0, 0.0)) for bill in bills]
        changed = [name for name, (a, b) in zip(NAMES, itertools.pairwise(prices), strict=True) if a != b]
        assert seam.passes == tuple(changed), key
        assert (seam.read, seam.driver) == tuple(zip(prices[0], prices[-1], strict=True))
    payload = {(s.source, s.reader) for s in after(0).seams if s.fields}
    assert {(s.source, s.reader) for s in toy.seams} == payload | {("rollout", "nobody")}


def test_what_saves_most_comes_first(toy: Explanation) -> None:
    saved = [s.read[0] - s.read[1] + s.driver[0] - s.driver[1] for s in toy.seams]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > saved[-1] == 0


def test_no_pass_makes_more_bytes_in_all_than_there_were() -> None:
    """`place` moves the reward off the driver, and so relays what it gives until `defer`; nothing else costs."""
    found = flowgraph.explain(QUICKSTART)
    for a, b in itertools.pairwise(found.stages):
        assert b.read <= a.read
        assert b.driver <= a.driver or b.name == "place"
        assert b.firings <= a.firings
    assert found.stages[-1].driver * 1000 < found.stages[0].driver


# --- as text and JSON --------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [TOY, QUICKSTART])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_tables_fit_and_name_every_pass_and_seam(graph: str, width: int) -> None:
    found = flowgraph.explain(graph)
    text = render(found, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    said = " ".join(text.split())
    for seam in found.seams:
        assert f"{seam.source} → {seam.reader}" in said
    starts = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert starts >= {"source", *NAMES, "compiled"}


def test_a_table_shows_changes_with_their_sign_and_a_dot_for_none() -> None:
    stages = (
        Stage("source", 3000, 3000, 64, 9),
        Stage("encode", 2000, 3500, 64, 9),
        Stage("fuse", 0, 0, 0, 7),
    )
    seams = (Change("a", "b", (3000, 0), (3000, 0), ("encode", "fuse")), Change("b", "c", (8, 8), (0, 0), ()))
    lines = [line.split() for line in render(Explanation("ring", stages, seams), 80).splitlines()]
    assert ["encode", "−1.00", "KB", "+500", "B", "·", "·"] in lines
    assert ["fuse", "−2.00", "KB", "−3.50", "KB", "−64", "B", "−2"] in lines
    assert ["compiled", "0", "B", "0", "B", "0", "B", "7"] in lines
    said = [" ".join(line) for line in lines]
    assert "a → b 3.00 KB → 0 B 3.00 KB → 0 B encode, fuse" in said
    assert "b → c 8 B 0 B" in said


def test_the_text_of_an_explanation_is_its_tables(toy: Explanation) -> None:
    assert str(toy) == render(toy)


def test_json_holds_the_whole_explanation(toy: Explanation) -> None:
    assert msgspec.json.decode(cli(TOY, "--json").stdout, type=Explanation) == toy


def test_a_graph_with_findings_is_not_explained() -> None:
    for stage in ([], ["--stage", "source"], ["--place"]):
        result = cli(TOY, "--set", "hops.train.in.lag=none", *stage)
        assert result.exit_code == 1
        assert "error[FG108]" in result.stderr
        assert result.stdout == ""


# --- stages and passes by name -----------------------------------------------------------------------------


def test_a_stage_is_the_graph_as_written_as_rewritten_or_its_plan() -> None:
    graph = load(TOY).graph
    assert graph is not None
    source, optimized, lowered = (cli(TOY, "--stage", s).stdout for s in ("source", "optimized", "lowered"))
    assert source == graph_text(graph, rates(graph))
    assert "at least 6 trajectories a step" in source
    assert optimized == graph_text(rewrite(graph), rates(graph))
    assert lowered == plan_text(compile_file(TOY))
    assert "gives unread f32[token]\n" in source
    assert "gives unread f32[token]: not written\n" in optimized
    assert "gives response_mask bool[token] Mask: bits\n" in optimized
    assert "fires as one: reward → advantage → train\n" in lowered
    assert cli(TOY, "--stage", "source", "--no-pass", "encode").stdout == source


@pytest.mark.parametrize("off", [("encode",), ("defer", "fuse"), ("all",)])
def test_a_pass_that_is_left_out_is_in_no_stage(off: tuple[str, ...]) -> None:
    options = [word for name in off for word in ("--no-pass", name)]
    names = NAMES if off == ("all",) else off
    assert cli(TOY, "--stage", "lowered", *options).stdout == plan_text(compile_file(TOY, off=names))
    made = from_json(cli(TOY, "--stage", "optimized", "--json", *options).stdout.encode())
    assert made == compile_file(TOY, off=names) == flowgraph.compile(TOY, no_pass=off)
    assert made.passes == tuple(name for name in NAMES if name not in names)


def test_the_source_as_json_is_the_plan_without_passes() -> None:
    assert from_json(cli(TOY, "--stage", "source", "--json").stdout.encode()) == compile_file(TOY, off=NAMES)


@pytest.mark.parametrize("command", ["check", "explain", "draw", "audit", "run"])
def test_an_unknown_pass_is_wrong_usage(command: str) -> None:
    result = CliRunner().invoke(main, [command, TOY, "--no-pass", "encod"])
    assert result.exit_code == 2
    assert "'encod' is not one of 'project'" in result.stderr


@pytest.mark.parametrize("call", [flowgraph.load, flowgraph.compile, flowgraph.explain, flowgraph.run])
def test_an_unknown_pass_is_a_value_error_that_names_those_that_there_are(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r"no pass 'encod'; passes: project, fold, .*fuse, or all"):
        call(TOY, no_pass=["encod"])


@pytest.mark.parametrize(
    "arguments", [[TOY, "--stage", "compiled"], [TOY, "--stage", "source", "--place"], []]
)
def test_wrong_usage_exits_two(arguments: list[str]) -> None:
    assert cli(*arguments).exit_code == 2


# --- codes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["FG204", "fg204"])
def test_a_code_is_told_by_its_page(code: str) -> None:
    assert cli(code).stdout == page("FG204")


def test_a_page_is_set_for_reading_on_a_terminal() -> None:
    code = "import sys; sys.stdout.isatty = lambda: True; from flowgraph.cli import main; main(['explain', 'FG204'])"
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "FG204: a dim without a size" in run.stdout
    assert "## " not in run.stdout
    assert "```" not in run.stdout


@pytest.mark.parametrize(("code", "meant"), [("FG2O4", "FG204"), ("fg5001", "FG501"), ("FG7", None)])
def test_an_unknown_code_is_answered_with_the_nearest_and_all(code: str, meant: str | None) -> None:
    result = cli(code)
    assert result.exit_code == 2
    assert f"there is no code {code.upper()}; " in result.stderr
    assert (f"did you mean {meant}?" in result.stderr) == (meant is not None)
    assert all(known in result.stderr for known in CODES)
    assert result.stdout == ""


def test_a_program_gets_a_code_with_its_title_and_page() -> None:
    found = json.loads(cli("fg109", "--json").stdout)
    assert found == {"code": "FG109", "title": CODES["FG109"], "page": page("FG109")}


def test_a_file_may_be_named_like_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fgraph").write_bytes(Path(TOY).read_bytes())
    assert "there is no code" not in cli("fgraph").stderr
    assert cli("fgraph", "--stage", "lowered").stdout.startswith("graph toy: ")


# --- FLOWGRAPH_DUMP ----------------------------------------------------------------------------------------


def dumped(directory: Path, monkeypatch: pytest.MonkeyPatch, off: Collection[str] = ()) -> dict[str, str]:
    """File → text of a dump into a directory that is not there yet, without the line that lists the passes."""
    monkeypatch.setenv("FLOWGRAPH_DUMP", str(directory))
    plan = compile_file(TOY, off=off)
    monkeypatch.delenv("FLOWGRAPH_DUMP")
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(directory.iterdir())}
    assert list(texts.values())[-1] == plan_text(plan)
    return {name: "".join(t.splitlines(True)[:1] + t.splitlines(True)[2:]) for name, t in texts.items()}


def test_a_dump_is_one_file_a_pass_in_order_that_differs_where_the_pass_did_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = dumped(tmp_path / "new/dir", monkeypatch)
    assert list(texts) == [f"{i:02d}-{name}.txt" for i, name in enumerate(["source", *NAMES])]
    same = [NAMES[i] for i, (a, b) in enumerate(itertools.pairwise(texts.values())) if a == b]
    assert same == ["narrow"]  # the toy promises no bound of anything that is written


def test_a_dump_leaves_out_what_is_left_out_and_without_the_variable_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = dumped(tmp_path / "some", monkeypatch, off=[name for name in NAMES if name != "fold"])
    assert list(texts) == ["00-source.txt", "01-fold.txt"]
    monkeypatch.chdir(tmp_path)
    compile_file(TOY)
    assert [path.name for path in tmp_path.iterdir()] == ["some"]


def test_what_an_earlier_dump_left_goes_and_what_is_no_dump_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped(tmp_path, monkeypatch)
    (tmp_path / "07-notes.txt").write_text("mine")
    monkeypatch.setenv("FLOWGRAPH_DUMP", str(tmp_path))
    compile_file(TOY, off=NAMES)
    assert {path.name for path in tmp_path.iterdir()} == {"00-source.txt", "07-notes.txt"}


def test_a_dump_that_cant_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for path, why in ((taken, "File exists"), (taken / "in", "Not a directory")):
        monkeypatch.setenv("FLOWGRAPH_DUMP", str(path))
        result = cli(TOY)
        assert result.exit_code == 1
        assert f"FLOWGRAPH_DUMP={path} can't be written ({why}: " in result.stderr
        assert len(result.stderr.splitlines()) == 1
