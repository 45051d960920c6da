"""Verify mode: every promise is checked, and a hop that keeps state is named with what it keeps."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowgraph.cli import main
from flowgraph.errors import HiddenState, PayloadError, PromiseBroken, RunError
from flowgraph.passes.rewrite import PASSES
from flowgraph.runtime import purity
from flowgraph.runtime.run import ExecutorName
from tests.runtime.harness import TOY, run_toy, steps

PROMISES, IMPURE = "tests.runtime.promises", "tests.runtime.impure"
READ = f"hops.sums={{use: {PROMISES}.sums, in: {{bits: look, last: look, tiled: look, small: look, double: look}}}}"


def promise(of: str, broken: str, leaf: int = -1) -> tuple[str, str]:
    """Overrides that add the hop, on the rows of another hop, and its reader."""
    add = f"{{use: {PROMISES}.promise, in: {{response_mask: {of}, leaf_offsets: {of}}}"
    return f"hops.look={add}, with: {{broken: '{broken}', leaf: {leaf}}}}}", READ


BROKEN = {
    "last": r"LastToken\(leaf, response_mask\) of last: element \d+ is 1000000.0, and would have to be 0.0",
    "tiled": r"TiledOver\(leaf, response_mask\) of tiled: element \d+ is 1000000.0, and would have to be 0.0",
    "small": r"Below\(token\) of small: element \d+ is 1000000, and the bound is \d+",
    "double": r"Derivable\(small\) of double: element \d+ is 1000000, and would have to be \d+",
}


@pytest.mark.parametrize("executor", ["inproc", "processes"])
def test_verification_changes_nothing(tmp_path: Path, executor: ExecutorName) -> None:
    sets = promise("batch", "")
    plain = run_toy(tmp_path / "a", *sets)
    done = run_toy(tmp_path / "b", *sets, executor=executor, verify=True)
    assert steps(done.directory) == steps(plain.directory)
    assert json.loads((Path(done.directory) / "plan.json").read_text())["verify"] is True


def test_the_command_line_asks_for_verification_and_ends_with_the_error(tmp_path: Path) -> None:
    command = [
        "run",
        TOY,
        "--executor",
        "inproc",
        "--plain",
        "--runs",
        str(tmp_path),
        "--set",
        kept("global"),
    ]
    done = CliRunner().invoke(main, [*command, "--verify"])
    assert done.exit_code == 1
    assert "error[FG907] hop look keeps state" in done.output
    assert CliRunner().invoke(main, command).exit_code == 0


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(
    ("leaf", "member"), [(-1, "trajectory 5, uid 1"), (0, "trajectory 0, uid 0"), (7, "trajectory 3, uid 1")]
)
def test_a_broken_promise_of_a_step_is_told_with_its_trajectory(
    tmp_path: Path, broken: str, leaf: int, member: str
) -> None:
    text = rf"hop look breaks the promise {BROKEN[broken]} \(step 1, {member}\)"
    with pytest.raises(PromiseBroken, match=text):
        run_toy(tmp_path, *promise("batch", broken, leaf), verify=True)


@pytest.mark.parametrize("executor", ["inproc", "processes"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_promise_of_a_trajectory_is_told_with_its_uid(
    tmp_path: Path, broken: str, executor: ExecutorName
) -> None:
    text = rf"hop look breaks the promise {BROKEN[broken]} \(trajectory \d, uid \d\)"
    with pytest.raises(PromiseBroken, match=text):
        run_toy(tmp_path, *promise("rollout", broken), executor=executor, verify=True)


@pytest.mark.parametrize("of", ["rollout", "batch"])
@pytest.mark.parametrize("broken", ["last", "tiled", "double"])
def test_without_verification_a_promise_is_taken_at_its_word(tmp_path: Path, broken: str, of: str) -> None:
    assert run_toy(tmp_path, *promise(of, broken)).steps == 6


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("off", [(), tuple(PASSES)])
def test_a_bound_and_a_dtype_are_checked_in_every_mode_and_under_all_passes(
    tmp_path: Path, verify: bool, off: tuple[str, ...]
) -> None:
    with pytest.raises(PromiseBroken, match=BROKEN["small"]):
        run_toy(tmp_path, *promise("batch", "small"), verify=verify, off=off)
    with pytest.raises(
        PayloadError, match=r"hop look gave bits as int8\[\d+\], and its port is bool\[token\]"
    ):
        run_toy(tmp_path, *promise("batch", "bits"), verify=verify, off=off)


def test_a_fold_that_breaks_a_promise_is_told_with_the_row_that_it_makes(tmp_path: Path) -> None:
    late = f"hops.batch={{use: {PROMISES}.late, in: {{ready: buffer}}}}"
    text = r"hop batch breaks the promise Below\(sample\) of lag: element 4 is 3, .* \(step 1, trajectory 4, uid 1\)"
    with pytest.raises(PromiseBroken, match=text):
        run_toy(tmp_path, late)


# --- hidden state --------------------------------------------------------------------------------------------------


def kept(name: str) -> str:
    return look("keep", options=f"how: {{use: {IMPURE}.way, name: {name}}}")


def look(hop: str, inputs: str = "tokens: batch", options: str = "") -> str:
    return f"hops.look={{use: {IMPURE}.{hop}, in: {{{inputs}}}, with: {{{options}}}}}"


COUNTS = look("keep", options=f"how: {{use: {IMPURE}.counts}}")
CHANGED = "hop look keeps state that it does not declare: %s changed while it ran"
AGAIN = "hop look is no function of what it reads: %s when it is called again with the same"
HIDDEN = {
    kept("global"): CHANGED % f"the global `SEEN` of {IMPURE}",
    kept("number"): CHANGED % f"the global `total` of {IMPURE}",
    kept("new"): CHANGED % f"the global `made_now` of {IMPURE}",
    kept("rng"): CHANGED % f"the global `RNG` of {IMPURE}",
    kept("default"): CHANGED % "the default of `of` of _helper",
    kept("attribute"): CHANGED % "the attribute `calls` of _in_an_attribute",
    kept("closure"): CHANGED % "`seen`, which _closing.<locals>.close closes over,",
    COUNTS: CHANGED % "its option how",
    look("draw"): AGAIN % "its output drawn differs",
    look("once"): AGAIN % "it raises KeyError: 'twice'",
    look("mutate", "ground_truth: batch"): (
        "hop look changes what it reads: its input ground_truth is another after the call"
    ),
}  # fmt: skip


@pytest.mark.parametrize("add", HIDDEN)
def test_a_hop_that_keeps_something_is_named_with_what_it_keeps(tmp_path: Path, add: str) -> None:
    with pytest.raises(HiddenState, match=re.escape(f"{HIDDEN[add]} (step 1)")):
        run_toy(tmp_path, add, verify=True)


def test_a_method_that_keeps_something_on_its_object_is_named() -> None:
    class Counter:
        calls = 0

        def count(self, n: int, *, step: int) -> int:
            if step:
                self.calls += step
            return n

    text = "hop look keeps state that it does not declare: the object that count is a method of changed"
    with pytest.raises(HiddenState, match=text):
        purity.call("hop look", functools.partial(Counter().count, step=1), {"n": 1})
    assert purity.call("hop look", functools.partial(Counter().count, step=0), {"n": 1}) == 1


def test_an_async_hop_is_no_exception_and_its_row_is_named(tmp_path: Path) -> None:
    text = CHANGED % f"the global `SEEN` of {IMPURE}"
    with pytest.raises(HiddenState, match=re.escape(text) + r" \(trajectory \d, uid \d\)"):
        run_toy(tmp_path, look("keep_async", "tokens: rollout"), executor="processes", verify=True)


def test_tables_caches_logs_and_locks_are_no_state(tmp_path: Path) -> None:
    add = look("pure", "tokens: batch, ground_truth: batch")
    assert run_toy(tmp_path, add, verify=True).steps == 6


def test_nobody_looks_for_state_unless_asked(tmp_path: Path) -> None:
    assert run_toy(tmp_path, kept("global")).steps == 6


@pytest.mark.parametrize(
    ("hop", "said"),
    [
        (
            "counter_beside",
            rf"keeps state that it does not declare: the global `SEEN` of {IMPURE} changed while",
        ),
        ("chancy", "is no function of what it reads: its state is another when it is called again"),
        ("teller", "is no function of what it reads: its output told differs when it is called again"),
        ("generator", "has a state that can't be copied, so it can't be replayed: TypeError: cannot pickle"),
    ],
)
def test_a_fold_may_change_its_state_and_nothing_else(tmp_path: Path, hop: str, said: str) -> None:
    with pytest.raises(HiddenState, match=rf"fold look {said}"):
        run_toy(tmp_path, look(hop, "trajectory: rollout"), verify=True)


def test_errors_of_verification_name_one_thing_to_do(tmp_path: Path) -> None:
    for i, add in enumerate((kept("global"), look("draw"), look("mutate", "ground_truth: batch"))):
        with pytest.raises(RunError) as caught:
            run_toy(tmp_path / str(i), add, verify=True)
        assert caught.value.code == "FG907"
        assert len(caught.value.help) > 20
