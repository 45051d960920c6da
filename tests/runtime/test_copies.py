"""Copies on a seam: what the audit says before a run is what a run counts, in place, by reference and through the
driver.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

import flowgraph
from flowgraph.plan.copies import Copies
from flowgraph.plan.measured import read_measured
from flowgraph.plan.ran import read_ran
from flowgraph.report.audit import Audit, FieldRow, audit, render_table, to_csv
from flowgraph.spec.outputs import asks
from tests.runtime import narrow, placing, toy
from tests.runtime.harness import run_toy
from tests.runtime.test_narrow import DIMS, HERE, READERS

PLACED = "hops.rollout.use=tests.runtime.placing.sample"


def ran(tmp_path: Path, *overrides: str, off: tuple[str, ...] = (), executor: str = "inproc") -> Audit:
    directory = run_toy(tmp_path, *overrides, off=off, executor=executor).directory  # type: ignore[arg-type]
    return audit(read_ran(directory, "toy"), read_measured(directory, "toy"))


def fields(found: Audit) -> dict[str, FieldRow]:
    return {f"{seam.reader}.{field.port}": field for seam in found.seams for field in seam.fields}


def crossing(found: Audit) -> dict[str, FieldRow]:
    return {name: field for name, field in fields(found).items() if field.copies and field.measured}


@pytest.mark.parametrize("off", [(), ("defer",)], ids=str)
@pytest.mark.parametrize("executor", ["inproc", "processes"])
@pytest.mark.parametrize("use", [(), (PLACED,)], ids=["copied", "placed"])
def test_every_field_is_copied_as_often_as_the_plan_has_it(
    tmp_path: Path, use: tuple[str, ...], executor: str, off: tuple[str, ...]
) -> None:
    found = crossing(ran(tmp_path, *use, off=off, executor=executor))
    assert {name: field.copied for name, field in found.items()} == {n: f.copies for n, f in found.items()}
    driver = {field.copies.driver for field in found.values() if field.copies}
    assert driver == ({0, 1} if off else {0})  # the driver's own blocks lie there already


def test_a_hop_that_writes_in_place_saves_the_writers_copy_and_one_row_read_as_it_lies_the_readers(
    tmp_path: Path,
) -> None:
    reads = "{tokens: rollout, leaf_offsets: rollout, ground_truth: rollout}"
    look = f"hops.look={{use: tests.runtime.toy.reward, in: {reads}}}"
    found = fields(ran(tmp_path, PLACED, look))
    assert found["look.tokens"].copied == Copies(0, 0, 0)
    assert found["look.tokens"].copying == "in place"
    assert found["reward.tokens"].copied == Copies(0, 0, 1)  # six rows are joined
    assert found["look.ground_truth"].copied == Copies(1, 0, 1)  # it is decoded


@pytest.mark.parametrize(("how", "copies"), [("turned", 1), ("some", 1), ("whole", 0)])
def test_what_a_hop_gives_in_other_memory_than_it_asked_for_is_seen_to_be_copied(
    tmp_path: Path, how: str, copies: int
) -> None:
    found = ran(tmp_path, PLACED, f"hops.rollout.with.how={how}")
    tokens = fields(found)["reward.tokens"]
    assert tokens.copies == Copies(0, 0, 1)
    assert tokens.copied == Copies(copies, 0, 1)
    assert tokens.copying == ("1 copy (2 copies as it ran)" if copies else "1 copy")
    assert f"from rollout; {tokens.copying}" in render_table(found, 120)
    rows = {row["reader"] + "." + row["port"]: row for row in csv.DictReader(io.StringIO(to_csv(found)))}
    assert (float(rows["reward.tokens"]["copies"]), float(rows["reward.tokens"]["copied"])) == (1, 1 + copies)


def test_bytes_copied_in_a_step_are_summed_over_all_seams(tmp_path: Path) -> None:
    found = ran(tmp_path)
    directory = next((tmp_path / "toy").iterdir())
    measured = read_measured(directory, "toy")
    assert found.copied is not None
    assert found.copied.writer == sum(measured.wrote.values()) / 6
    assert found.copied.driver == 0
    assert 0 < found.copied.reader < sum(measured.read.values()) / 6
    text = render_table(found, 100)
    assert "copied by writers" in text
    assert "copied by the driver" not in text


def test_whether_a_hop_asks_for_the_memory_of_its_outputs_is_read_off_its_code() -> None:
    assert asks(placing.sample) == frozenset()
    assert asks(toy.sample) is None
    assert asks(lambda: [flowgraph.outputs(toy.sample, token=n, leaf=1) for n in range(3)]) == frozenset()
    assert asks(lambda rows: [row.outputs for row in rows]) is None
    assert asks(len) is None
    assert "experts" in (asks(narrow.placed) or ())


@pytest.mark.parametrize(
    ("dtype", "off", "copies"),
    [
        ("uint8", (), "in place"),
        ("uint8", ("narrow",), "in place"),  # as int32
        ("uint16", (), "in place (1 copy as it ran)"),
    ],
)
def test_integers_may_be_written_in_place_in_the_dtype_in_which_they_are_stored(
    tmp_path: Path, dtype: str, off: tuple[str, ...], copies: str
) -> None:
    choose = f"hops.choose={{use: {HERE}.placed, in: {{tokens: rollout}}, with: {{dtype: {dtype}}}}}"
    found = fields(ran(tmp_path, *DIMS, choose, *READERS, off=off))
    assert found["one.experts"].copying == copies
