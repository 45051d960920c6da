"""The audit's arithmetic, by hand: prices, shares, the driver's part, and measured beside predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from flowgraph.plan.compile import compile_file
from flowgraph.plan.copies import Copies
from flowgraph.plan.plan import Plan
from flowgraph.report.audit import Audit, FieldRow, Measured, SeamRow, audit, render_table, to_json
from flowgraph.spec.units import per_step, percent_text, share_text, size_text
from tests.unit import plans

GRAPH = str(Path(__file__).parents[2] / "graphs" / "quickstart.yaml")
SIZES = [
    "dims.prompt={mean: 32, max: 64}",
    "dims.response={mean: 4, max: 8}",
    "dims.group=8",
    "dims.sample=8",
]


@pytest.fixture(scope="module")
def quickstart() -> Plan:
    return compile_file(GRAPH, SIZES)


def row(found: Audit, source: str, reader: str) -> SeamRow:
    return next(s for s in found.seams if (s.source, s.reader) == (source, reader))


def field(seam: SeamRow, port: str) -> FieldRow:
    return next(f for f in seam.fields if f.port == port)


def test_tokens_cost_two_bytes_each_because_the_vocabulary_is_below_65536(quickstart: Plan) -> None:
    tokens = field(row(audit(quickstart), "batch", "reward"), "tokens")
    assert tokens.mean == 64 * (32 + 4) * 2 == 4608
    assert tokens.max == 64 * (64 + 8) * 2 == 9216
    assert (tokens.producer, tokens.type, tokens.copies) == ("rollout", "i32[token]", Copies(1, 0, 1))


def test_the_prompt_costs_one_read_a_trajectory(quickstart: Plan) -> None:
    seam = row(audit(quickstart), "dispatch", "rollout")
    assert field(seam, "prompt").mean == 64 * 32 * 2
    assert field(seam, "key").mean == 64 * 8
    assert seam.by_reference == 64 * 32 * 2


def test_what_hops_of_a_group_read_alike_crosses_once(quickstart: Plan) -> None:
    found = audit(quickstart)
    assert field(row(found, "batch", "train"), "tokens").mean == 0
    assert field(row(found, "batch", "train"), "logprobs").mean == 64 * 36 * 4
    assert row(found, "advantage", "train").transport == "fused"


def test_weights_cost_the_bytes_of_the_model_and_come_first(quickstart: Plan) -> None:
    found = audit(quickstart)
    weights = field(row(found, "train", "sync"), "weights")
    assert weights.mean == weights.max == 269_030_016
    assert weights.copies == Copies(1, 0, 0)
    assert (found.seams[0].source, found.seams[0].reader) == ("train", "sync")


def test_shares_sum_to_one_and_rank_the_seams(quickstart: Plan) -> None:
    seams = audit(quickstart).seams
    assert sum(s.share for s in seams) == pytest.approx(1.0)
    assert [s.mean for s in seams] == sorted((s.mean for s in seams), reverse=True)
    assert len(seams) == len(quickstart.seams)


def test_the_driver_pays_for_what_its_hops_wrote_and_others_read(quickstart: Plan) -> None:
    found = audit(quickstart)
    truth = field(row(found, "batch", "reward"), "ground_truth").mean
    prompt, key, uid, trajectory, batch_id = 64 * 32 * 2, 64 * 8, 64 * 8, 64 * 8, 8
    assert truth == 8 * 256  # once a group
    assert found.driver.mean == prompt + key + uid + trajectory + batch_id + truth
    assert {(p.writer, p.reader) for p in found.owners} == {
        ("driver", "rollout"),
        ("driver", "trainer"),
        ("rollout", "trainer"),
        ("trainer", "rollout"),
        ("trainer", "trainer"),
    }
    assert sum(p.mean for p in found.owners) == found.total.mean == sum(s.mean for s in found.seams)


def test_measured_bytes_are_means_over_the_steps() -> None:
    plan = plans.plan(
        [plans.seam("a", "b", plans.field("a", "x", 100, 150), plans.field("a", "y", 300, 300))]
    )
    found = audit(plan, Measured(10, {"b.x": 1600, "b.y": 2400}, {"a.x": 1600, "a.y": 2400}, 70))
    seam = found.seams[0]
    assert (field(seam, "x").measured, field(seam, "y").measured) == (160, 240)
    assert (field(seam, "x").exceeds, field(seam, "y").exceeds, seam.exceeds) == (True, False, True)
    assert (seam.measured, seam.declared, seam.difference) == (400, 0, None)
    assert (found.steps, found.control_bytes, found.total.measured) == (10, 7, 400)


def test_a_port_that_was_never_read_leaves_its_sums_unknown() -> None:
    plan = plans.plan([plans.seam("a", "b", plans.field("a", "x"), plans.field("a", "y"))])
    found = audit(plan, Measured(10, {"b.x": 1600}, {}, 0))
    assert field(found.seams[0], "x").measured == 160
    assert found.seams[0].measured is None
    assert found.total.measured is None


def test_a_run_without_a_step_measured_nothing() -> None:
    plan = plans.plan([plans.seam("a", "b", plans.field("a"))])
    assert audit(plan, Measured(0, {}, {}, 12)) == audit(plan)


def test_a_plan_without_payload_has_no_shares() -> None:
    found = audit(plans.plan([plans.seam("a", "b", control=["rows"])]))
    assert [s.share for s in found.seams] == [0.0]
    assert found.total.mean == found.driver.mean == 0
    assert "a → b" in render_table(found)


def test_json_holds_the_whole_audit(quickstart: Plan) -> None:
    found = audit(quickstart)
    assert msgspec.json.decode(to_json(found), type=Audit) == found
    assert json.loads(to_json(found))["driver"]["mean"] == found.driver.mean


@pytest.mark.parametrize("width", [72, 80, 100, 140])
@pytest.mark.parametrize("ran", [False, True])
def test_the_table_fits_its_width_and_names_every_seam(quickstart: Plan, width: int, ran: bool) -> None:
    read = {f"{s.reader}.{f.port}": int(f.max_bytes * 6) for s in quickstart.seams for f in s.fields}
    found = audit(quickstart, Measured(3, read, {}, 999) if ran else None)
    text = render_table(found, width)
    assert max(map(len, text.splitlines())) <= width
    for seam in found.seams if width >= 80 else ():
        assert f"{seam.source} → {seam.reader}" in " ".join(text.split())
    assert "269 MB" in text
    assert ("control messages 333 B/step" in text) == ran
    assert ("!" in text) == ran
    assert "tokens" not in render_table(found, width, fields=False)


def test_what_has_no_price_says_so() -> None:
    fields = [plans.field("a", "w", 0, 0, "tensors", priced=False), plans.field("a", "x", 100, 100)]
    text = render_table(audit(plans.plan([plans.seam("a", "b", *fields)])), 100)
    assert "unpriced" in text
    assert "100 B+?" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (0.25, "<1 B"),
        (8, "8 B"),
        (12.5, "12.5 B"),
        (999, "999 B"),
        (999.7, "1.00 KB"),
        (1000, "1.00 KB"),
        (8704, "8.70 KB"),
        (9996, "10.0 KB"),
        (99_960, "100 KB"),
        (999_499, "999 KB"),
        (999_600, "1.00 MB"),
        (269_030_016, "269 MB"),
        (1.2e9, "1.20 GB"),
        (3e18, "3000 PB"),
    ],
)
def test_sizes_have_three_digits(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text
    assert per_step(nbytes) == f"{text}/step"


def test_percentages_are_signed_and_shares_never_lie_about_zero_and_all() -> None:
    assert [percent_text(v) for v in (4.24, -12, 0, -0.001)] == ["+4.2%", "-12.0%", "0.0%", "0.0%"]
    assert [share_text(v) for v in (0, 0.0001, 0.5, 0.9999, 1)] == ["0%", "<0.1%", "50.0%", ">99.9%", "100%"]


def test_draw_and_audit_import_neither_torch_nor_networkx() -> None:
    code = (
        "import sys, flowgraph.report.draw, flowgraph.report.audit; "
        "print([m for m in ('torch', 'networkx', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
