"""What a hop reads stays what it was, whatever others do with it and wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgraph.errors import DeadlineError, LedgerError, PayloadError
from flowgraph.passes.pipeline import load
from flowgraph.passes.rewrite import PASSES
from tests.runtime.harness import TOY, run_toy, steps

HERE = "tests.runtime.keeping"
SHORT = (
    f"hops.short={{use: {HERE}.short, in: {{leaf_offsets: rollout}}}}",
    "hops.buffer.in.trajectory=short",
    "hops.dispatch.in.finished=short",
)


def seen(tmp_path: Path, *overrides: str, verify: bool = False) -> list[dict[str, float]]:
    """What the added hops say with every pass, after comparing it with what they say without any."""
    on, off = (
        steps(run_toy(tmp_path / name, *overrides, off=left, verify=verify).directory)
        for name, left in (("on", ()), ("off", tuple(PASSES)))
    )
    assert on == off
    return on


def test_what_is_handed_on_is_laid_out_as_what_crosses_and_each_reader_has_its_own(tmp_path: Path) -> None:
    reads = "in: {strided: odd, columns: odd, notes: odd}"
    found = seen(
        tmp_path,
        f"hops.odd={{use: {HERE}.odd, in: {{tokens: batch}}}}",
        f"hops.first={{use: {HERE}.sums, {reads}}}",
        f"hops.second={{use: {HERE}.sums, {reads}}}",
    )
    assert [(one["first.left"], one["second.left"]) for one in found] == [(2, 2)] * 6


@pytest.mark.parametrize("verify", [False, True])
def test_forms_that_need_each_other_share_other_rows_or_are_made_of_text(
    tmp_path: Path, verify: bool
) -> None:
    ports = "one, other, turn_offsets, turns, texts, lengths"
    reads = ", ".join(f"{name}: formed" for name in ports.split(", "))
    found = seen(
        tmp_path,
        "dims.turn=20",
        "dims.letter=40",
        f"hops.formed={{use: {HERE}.formed, in: {{tokens: rollout, leaf_offsets: rollout}}}}",
        f"hops.reads={{use: {HERE}.read_formed, in: {{leaf_offsets: rollout, {reads}}}}}",
        verify=verify,
    )
    assert len(found) == 6


def test_bounds_that_do_not_fit_their_dtype_when_they_are_joined_are_refused(tmp_path: Path) -> None:
    more = (
        f"hops.small={{use: {HERE}.small_bounds, in: {{leaf_offsets: rollout}}}}",
        f"hops.reads={{use: {HERE}.read_bounds, in: {{bounds: batch}}}}",
        "hops.buffer.in.trajectory=small",
        "hops.dispatch.in.finished=small",
    )
    with pytest.raises(PayloadError, match="bounds of 6 rows end at 1200 when they are joined"):
        run_toy(tmp_path, *more)


# --- folds -----------------------------------------------------------------------------------------------------


def test_a_fold_may_keep_what_it_reads_and_reads_it_before_it_dies(tmp_path: Path) -> None:
    found = seen(
        tmp_path,
        *SHORT,
        f"hops.keeps={{use: {HERE}.keeps, in: {{trajectory: short, width: short}}}}",
        f"hops.tell={{use: {HERE}.tell, in: {{changed: keeps, batch_id: batch}}}}",
    )
    assert [one["tell.changed"] for one in found] == [0] * 6


def test_rows_that_wait_in_a_pool_outlive_what_lives_until_they_are_taken() -> None:
    more = f"hops.shown={{use: {HERE}.shown, in: {{ready: buffer, width: buffer}}}}"
    (found,) = load(TOY, (*SHORT, more)).diagnostics
    assert (found.code, found.message) == (
        "FG303",
        "shown reads short.width as long as its trajectory waits, but it dies with its trajectory",
    )


def test_two_folds_take_the_groups_of_a_source_that_writes_nothing(tmp_path: Path) -> None:
    """The source waits for both, and both know how long a prompt is that nobody reads."""
    found = seen(
        tmp_path,
        "run.show=[train.loss]",
        "hops.rollout={use: tests.runtime.keeping.three, in: {leaves: plain}}",
        "hops.plain={use: tests.runtime.keeping.blank, in: {uid: dispatch}}",
        "hops.dataset={use: tests.runtime.keeping.bare}",
        "dims.leaf=3",
        "hops.reward={use: tests.runtime.keeping.even, in: {leaf_offsets: batch}}",
        "hops.prompts={use: tests.runtime.keeping.prompts, in: {group: dataset}}",
        "hops.tell={use: tests.runtime.keeping.tell, in: {changed: prompts, batch_id: batch}}",
    )
    assert 0 < found[0]["tell.changed"] < found[-1]["tell.changed"] < 100


def test_a_row_that_hops_work_on_can_not_be_dropped(tmp_path: Path) -> None:
    more = (
        *SHORT,
        f"hops.hasty={{use: {HERE}.hasty, in: {{finished: rollout}}}}",
        "hops.buffer.in.dropped=hasty",
        "hops.dispatch.in.dropped=hasty",
    )
    with pytest.raises(LedgerError, match="hop hasty can't drop trajectory 0: short is not done with it"):
        run_toy(tmp_path, "hops.rollout.with.jitter=0", *more)


def test_a_fold_is_not_told_of_a_row_before_what_it_reads_of_it_is_there_nor_after_it_died() -> None:
    early = f"hops.early={{use: {HERE}.early, in: {{finished: rollout, width: short}}}}"
    found = load(TOY, (*SHORT, early)).diagnostics
    message = "early is told of a trajectory by rollout, before short gives it its width"
    assert [(d.code, d.help) for d in found if d.message == message] == [("FG406", "write finished: short")]
    (left,) = load(TOY, (*SHORT, early, "hops.early.in.finished=short")).diagnostics
    assert (left.code, left.help) == ("FG303", f'declare lifetime="consumed" for {HERE}.short')


@pytest.mark.parametrize("deadline", [5, 2])
def test_hops_that_fire_as_one_have_the_time_of_all_of_them(tmp_path: Path, deadline: int) -> None:
    more = (
        f"hops.slow={{use: {HERE}.slow, in: {{batch_id: batch}}, with: {{seconds: 3}}}}",
        f"hops.after={{use: {HERE}.slow_after, in: {{notes: slow}}, with: {{seconds: 3}}}}",
        "run.steps=1",
        f"run.deadline={deadline}",
    )
    if deadline == 5:
        assert run_toy(tmp_path, *more, executor="processes").steps == 1
        return
    with pytest.raises(DeadlineError, match=r"hops slow → after \(step 1\) on owner trainer has run for 4 s"):
        run_toy(tmp_path, *more, executor="processes")
