"""What `flowgraph audit` prints and exports: savings, a single controller's load, CSV, a run beside its price."""

from __future__ import annotations

import csv
import io
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import flowgraph
from bench.compile import ring
from flowgraph.cli import main
from flowgraph.plan.measured import Measured
from flowgraph.plan.plan import from_json, to_json
from flowgraph.report.audit import audit, measured_over, render_naive, render_table, to_csv
from flowgraph.report.audit.controller import times
from flowgraph.report.audit.export import HEAD
from flowgraph.spec.budgets import BudgetDecl
from flowgraph.spec.units import read_amount
from tests.unit import plans
from tests.unit.replay import GRAPH

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests/runtime/toy.yaml"
OFF = ["project", "fold", "encode", "narrow", "place", "defer", "fuse"]


@pytest.fixture
def replay(tmp_path: Path) -> Path:
    path = tmp_path / "replay.yaml"
    path.write_text(GRAPH)
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the toy ring, whose trajectories have lengths of their own."""
    return flowgraph.run(
        TOY, executor="inproc", runs=tmp_path_factory.mktemp("runs"), steps=3, live=False
    ).directory


def cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


def field(found: flowgraph.Audit, reader: str, port: str) -> flowgraph.report.audit.FieldRow:
    return next(f for s in found.seams if s.reader == reader for f in s.fields if f.port == port)


# --- what the passes save --------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.sets(st.sampled_from(OFF)), st.integers(1, 4), st.integers(1, 40))
def test_what_each_pass_saves_sums_to_before_less_after(off: set[str], sample: int, response: int) -> None:
    loaded = flowgraph.load(TOY, {"dims.sample": sample, "dims.response": response})
    found = flowgraph.audit(loaded, no_pass=off)
    for seam in found.seams:
        if seam.before is not None and seam.driver_before is not None:
            assert seam.before - sum(s.read for s in seam.saved) == pytest.approx(seam.mean, abs=8)
            assert seam.driver_before - sum(s.driver for s in seam.saved) == pytest.approx(seam.driver, abs=8)
        assert not {one.name for one in seam.saved} & off
        for row in seam.fields:
            assert row.naive is None or row.naive.read_raw >= row.mean
    assert found.naive is not None
    assert found.naive.controller_raw >= found.driver.mean - sum(
        f.driver for s in found.seams for f in s.fields if f.naive is None
    )


def test_the_table_says_what_each_pass_saves_and_who_else_reads(replay: Path) -> None:
    text = render_table(flowgraph.audit(replay), 140)
    whole, left = 8 * 30 * 61 * 8 * 4, 8 * 30 * 61 * 8
    assert (whole, left) == (468_480, 117_120)
    assert "read 468 KB → 117 KB: narrow −351 KB\n" in text
    assert "through the driver 937 KB → 8 B: narrow −703 KB, defer −234 KB\n" in text
    assert "routed_experts i32[token, layers, top_k] Below(experts) from rollout; as uint8; 2 copies" in text
    assert "also read by" in render_table(flowgraph.audit(ROOT / "graphs/quickstart.yaml"), 140)
    assert "without any pass" in text


def test_colour_marks_only_what_dominates_or_is_over_a_budget() -> None:
    plain = plans.plan([plans.seam("a", f"b{i}", plans.field("a", mean=100)) for i in range(3)])
    assert "\x1b[1;31m" not in render_table(audit(plain), color=True)
    assert "\x1b" not in render_table(audit(plain))
    hot = plans.plan(
        [plans.seam("a", "b", plans.field("a", mean=300)), plans.seam("b", "c", plans.field("b"))]
    )
    assert re.findall(r"\x1b\[1;31m(\S+ → \S+)", render_table(audit(hot), color=True)) == ["a → b"]
    over = flowgraph.audit(flowgraph.load(TOY, {"budgets": {"batch -> train": "1 B/step"}}))
    assert "batch → train  over batch -> train 1 B/step" in render_table(over, 140)


def test_the_table_of_a_thousand_hops_is_cheap_and_fits(tmp_path: Path) -> None:
    path = tmp_path / "ring.yaml"
    path.write_text(ring(1000))
    found = flowgraph.audit(path)
    text = render_table(found, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"{s.source} → {s.reader}" in text for s in found.seams if s.fields)


# --- a single controller ---------------------------------------------------------------------------------------


def test_a_controller_carries_1952_bytes_a_token_and_2603_as_base64(replay: Path) -> None:
    one = field(flowgraph.audit(replay), "sync", "routed_experts").naive
    assert one is not None
    assert one.token_raw == 61 * 8 * 4 == 1952
    assert one.token_base64 is not None
    assert round(one.token_base64) == 2603
    assert one.read_raw == 8 * 63 * 1952  # 4 × 2 trajectories, padded to 16 + 47 tokens
    assert one.controller_raw == 2 * one.read_raw  # into it, and out again
    text = render_naive(flowgraph.audit(replay), 100)
    assert re.search(
        r"^sync.routed_experts from rollout +1,952 B +984 KB +1.97 MB +117 KB +0 B +8.4×$", text, re.M
    )
    assert re.search(r"^  i32\[token, layers, top_k\], as base64 +2,603 B +1.31 MB +2.62 MB$", text, re.M)
    assert "padded to the bounds of its dims" in text
    assert max(map(len, text.splitlines())) <= 100


def test_an_indexer_costs_499712_bytes_a_token(replay: Path) -> None:
    one = field(flowgraph.audit(flowgraph.load(replay, {"dims.top_k": 2048})), "sync", "routed_experts").naive
    assert one is not None
    assert one.token_raw == 61 * 2048 * 4 == 499_712
    assert "499,712 B" in render_naive(flowgraph.audit(flowgraph.load(replay, {"dims.top_k": 2048})))


def test_what_still_moves_says_which_part_each_rank_reads(replay: Path) -> None:
    plan = flowgraph.compile(replay)
    seams = []
    for seam in plan.seams:
        fields = tuple(
            msgspec.structs.replace(
                f, ranks=128, slice_bytes=915.0, split=(("trajectory", 16), ("layers", 8))
            )
            if f.port == "routed_experts"
            else f
            for f in seam.fields
        )
        seams.append(msgspec.structs.replace(seam, fields=fields))
    text = render_naive(audit(msgspec.structs.replace(plan, seams=tuple(seams))), 200)
    assert (
        "  routed_experts i32[token, layers, top_k], as uint8: 117 KB once, rollout → trainer; "
        "each of 128 ranks reads 1/16 of trajectory × 1/8 of layers, 915 B\n" in text
    )


def test_factors_never_divide_by_nothing() -> None:
    assert [times(*p) for p in ((8, 2), (1000, 1), (5, 0), (0, 0))] == ["4.0×", "1,000×", "all", "–"]


# --- CSV -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [TOY, ROOT / "graphs/quickstart.yaml"], ids=["toy", "quickstart"])
def test_csv_has_a_row_a_field_and_loses_no_number(graph: Path) -> None:
    found = flowgraph.audit(graph)
    head, *rows = list(csv.reader(io.StringIO(to_csv(found), newline="")))
    assert tuple(head) == HEAD
    fields = [(s, f) for s in found.seams for f in s.fields]
    assert len(rows) == len(fields)
    for row, (seam, one) in zip(rows, fields, strict=True):
        cells = dict(zip(head, row, strict=True))
        assert (cells["source"], cells["reader"], cells["port"]) == (seam.source, seam.reader, one.port)
        assert (float(cells["mean"]), int(cells["max"])) == (one.mean, one.max)
        assert cells["naive_read_raw"] == ("" if one.naive is None else str(one.naive.read_raw))
        assert cells["measured"] == ""
        assert cells["readers"].split() == list(one.readers)


def test_csv_json_and_the_naive_table_exclude_each_other() -> None:
    text = to_csv(flowgraph.audit(TOY))
    assert cli(TOY, "--csv").stdout_bytes.decode() == text
    assert text.count("\r\n") == text.count("\n") > 5
    for pair in (["--csv", "--json"], ["--naive", "--csv"]):
        assert cli(TOY, *pair).exit_code == 2


# --- a run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [[], ["defer"], OFF], ids=["all on", "defer off", "all off"])
def test_a_run_moves_what_it_costs_at_its_lengths_and_never_more_than_the_maximum(
    off: list[str], tmp_path: Path
) -> None:
    done = flowgraph.run(TOY, executor="inproc", runs=tmp_path, steps=4, live=False, no_pass=off)
    found = flowgraph.audit(TOY, done.directory, no_pass=off)
    assert found.notes == ()
    fields = [f for s in found.seams for f in s.fields]
    assert all(f.expected is not None and f.measured is not None for f in fields)
    for one in fields:
        assert one.measured == pytest.approx(one.expected, rel=0.01)
        assert not one.off
        assert not one.exceeds
    fixed = [f for f in fields if "token" not in f.type and not f.type.startswith(("text", "json"))]
    assert fixed
    assert all(f.measured == f.expected for f in fixed)
    assert any(s.declared for s in found.seams)
    text = render_table(found, 120)
    assert "≠" not in text
    assert "declared means off by" in text


def test_what_differs_from_its_price_is_marked(ran: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ran, tmp_path / "run"))
    seams = msgspec.json.decode((copy / "seams.json").read_bytes())
    seams["read"]["reward.tokens"] = int(seams["read"]["reward.tokens"] * 1.02)
    (copy / "seams.json").write_bytes(msgspec.json.encode(seams))
    found = flowgraph.audit(TOY, copy)
    assert [(f.port, f.off) for s in found.seams for f in s.fields if f.off] == [("tokens", True)]
    text = cli(TOY, "--run", copy).stdout
    assert "≠ measured is more than 1% off" in text
    assert len(re.findall(r"B ≠  ", text)) == 2  # the field and its seam


def test_a_graph_that_has_changed_since_is_priced_by_the_plan_that_ran(ran: Path) -> None:
    then, now = flowgraph.audit(TOY, ran), flowgraph.audit(flowgraph.load(TOY, {"dims.group": 9}), ran)
    assert now.notes == (
        "the graph or its hops changed since this run (dims.group); priced is the plan that ran",
    )
    assert now.seams == then.seams
    assert now.naive == then.naive
    off = flowgraph.audit(TOY, ran, no_pass=["defer"])
    assert off.notes == (
        "the graph or its hops changed since this run (passes); priced is the plan that ran",
    )
    assert off.seams == then.seams


def test_a_plan_whose_hops_are_gone_is_priced_without_what_only_they_tell(ran: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ran, tmp_path / "run"))
    plan = from_json((copy / "plan.json").read_bytes())
    hops = plan.hops | {"reward": msgspec.structs.replace(plan.hops["reward"], use="gone.reward")}
    (copy / "plan.json").write_bytes(to_json(msgspec.structs.replace(plan, hops=hops)))
    found = flowgraph.audit(TOY, copy)
    assert found.notes == (
        "the graph or its hops changed since this run (hops.reward); priced is the plan that ran",
    )
    assert found.naive is None
    refused = cli(TOY, "--naive", "--run", copy)
    assert refused.exit_code == 2
    assert "give --naive without --run" in refused.stderr


def test_a_run_of_another_graph_or_version_is_refused_by_name(
    ran: Path, tmp_path: Path, replay: Path
) -> None:
    other = cli(replay, "--run", ran)
    assert other.exit_code == 2
    assert "is a run of the graph toy, not of replay" in other.stderr
    copy = Path(shutil.copytree(ran, tmp_path / "run"))
    (copy / "plan.json").write_text('{"graph": "toy"}')
    old = cli(TOY, "--run", copy)
    assert old.exit_code == 2
    assert "is no plan of this version of flowgraph" in old.stderr


def test_a_run_without_lengths_says_so_and_shows_no_difference(ran: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ran, tmp_path / "run"))
    seams = msgspec.json.decode((copy / "seams.json").read_bytes())
    del seams["lengths"]
    (copy / "seams.json").write_bytes(msgspec.json.encode(seams))
    found = flowgraph.audit(TOY, copy)
    assert all(s.expected is None and s.difference is None for s in found.seams)
    assert "the run recorded no lengths" in found.notes[0]
    assert "the run recorded no lengths" in str(found)


# --- fail over -------------------------------------------------------------------------------------------------


def test_fail_over_exits_with_1_and_names_what_brings_it_under() -> None:
    over = ["--set", "budgets.driver=700 B/step"]
    assert cli(TOY, *over).exit_code == 0
    found = cli(TOY, *over, "--fail-over")
    assert found.exit_code == 1
    assert "driver moves 748 B a step, 48 B over its budget of 700 B/step: " in found.stderr
    assert "help: --set dims." in found.stderr
    assert "over driver 700 B/step" in found.stdout
    none = cli(TOY, "--fail-over")
    assert (none.exit_code, none.stderr) == (0, f"{TOY} has no budgets, so nothing can be over one\n")


def test_fail_over_of_a_run_compares_what_it_measured(ran: Path) -> None:
    budget = "budgets.driver=100000 B/step"
    assert cli(TOY, "--run", ran, "--fail-over", "--set", budget).exit_code == 0
    plan = plans.plan([plans.seam("a", "b", plans.field("a", "x", 100, 900))], owners=("driver", "rollout"))
    found = audit(plan, Measured(10, {"b.x": 1600}, {}, 0))
    place = plans.PLACE
    budgets = [
        BudgetDecl(name, place, read_amount(amount), place)
        for name, amount in (
            ("driver", "159 B/step"),
            ("a -> b", "160 B/step"),
            ("shared memory", "9 B/step"),
            ("driver", "1 B"),
        )
    ]
    assert [d.message for d in measured_over(found, budgets)] == [
        "driver moved 160 B a step, measured over 10 steps, 1 B over its budget of 159 B/step",
        "shared memory moved 160 B a step, measured over 10 steps, 151 B over its budget of 9 B/step",
    ]
