"""A batch policy that reads scores: groups of equal ones are dropped, others sampled instead, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgraph.errors import HopError
from flowgraph.passes.pipeline import load
from flowgraph.passes.rewrite import PASSES
from flowgraph.runtime.run import ExecutorName
from tests.runtime.generated import run_generated
from tests.runtime.harness import metrics, only_run, run_toy, steps, summary

QUICKSTART = str(Path(__file__).parents[2] / "graphs/quickstart.yaml")
DROP_EQUAL = (
    "hops.buffer.in.trajectory=reward",
    "hops.dispatch.in.finished=reward",
    "hops.batch.in.score=buffer",
    "hops.batch.with={drop_equal: true}",
)
TOY = (
    "hops.reward={use: tests.runtime.users.graded, in: {tokens: rollout, uid: rollout}}",
    "hops.seen={use: tests.runtime.users.count_even, in: {uid: batch}}",
    *DROP_EQUAL,
)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_groups_of_equal_scores_are_dropped_and_others_sampled_in_their_place(
    tmp_path: Path, max_lag: int
) -> None:
    done = run_toy(tmp_path, f"hops.dispatch.in.version.max_lag={max_lag}", *TOY, verify=True)
    ledger = summary(done.directory)["ledger"]
    assert done.steps == 6
    assert ledger["consumed"] == 6 * 6
    assert ledger["dropped"]["equal scores"] >= 3 * 6
    assert ledger["dropped"]["equal scores"] % 3 == 0
    assert set(ledger["dropped"]) <= {"equal scores", "stale", "run ended"}
    assert ledger["dispatched"] == ledger["consumed"] + sum(ledger["dropped"].values())
    assert [one["seen.even"] for one in steps(done.directory)] == [0] * 6
    assert max(one["lag_max"] for one in metrics(done.directory) if "lag_max" in one) <= max_lag


def test_without_the_option_they_are_trained(tmp_path: Path) -> None:
    done = run_toy(tmp_path, *TOY, "hops.batch.with={}")
    assert sum(one["seen.even"] for one in steps(done.directory)) > 0
    assert "equal scores" not in summary(done.directory)["ledger"]["dropped"]


@pytest.mark.parametrize("executor", ["inproc", "processes"])
@pytest.mark.parametrize("off", [(), tuple(PASSES)], ids=["passes on", "passes off"])
def test_both_executors_with_and_without_passes_give_equal_steps(
    tmp_path: Path, executor: ExecutorName, off: tuple[str, ...]
) -> None:
    done = run_toy(tmp_path / "one", *TOY, executor=executor, off=off)
    reference = run_toy(tmp_path / "reference", *TOY)
    assert learned(done.directory) == learned(reference.directory)
    assert summary(done.directory)["ledger"] == summary(reference.directory)["ledger"]


def learned(directory: str) -> list[dict[str, float]]:
    """What each step was made of, and gave: the loss is a checksum of all that came in."""
    named = ("train.loss", "reward.reward", "seen.even", "lag_max")
    return [{name: one[name] for name in named} for one in steps(directory)]


def test_a_run_of_which_all_scores_are_equal_ends_by_name(tmp_path: Path) -> None:
    always = "hops.reward.use=tests.runtime.users.always_right"
    with pytest.raises(HopError, match=r"fold batch: .*40 groups in a row were dropped.*equal scores: 40"):
        run_toy(tmp_path, *TOY, always)
    assert summary(only_run(tmp_path))["ledger"]["consumed"] == 0


def test_on_generated_data_of_the_library_the_run_goes_on(smollm2: str) -> None:
    loaded = load(
        QUICKSTART,
        [
            "run.steps=4",
            "run.deadline=20",
            "dims.sample=2",
            "hops.reward.in={tokens: rollout, response_mask: rollout, leaf_offsets: rollout, ground_truth: rollout, "
            "uid: rollout}",
            "hops.reward.with={function: tests.runtime.users.is_odd}",
            *DROP_EQUAL,
        ],
    )
    assert loaded.diagnostics == []
    assert loaded.graph is not None
    ring = run_generated(loaded.graph, {"smollm2-135m": smollm2})
    counts = ring.ledger.counts
    assert ring.steps_done == 4
    assert counts.consumed == 4 * 8 * 2
    assert counts.dropped["equal scores"] > 0
    assert counts.dispatched == counts.consumed + sum(counts.dropped.values())


WITHHOLD = (
    "hops.dispatch.in.version.max_lag=1",
    "hops.rollout={use: tests.runtime.users.straggle, in: {prompt: dispatch, key: dispatch}}",
    "hops.rollout.with={share: 0.3, seconds: 0.05}",
    "hops.dispatch.with={target: 3}",  # so that many a group spans two versions
    "hops.reward={use: tests.runtime.users.graded, in: {tokens: rollout, uid: rollout}}",
    "hops.buffer.in.trajectory=reward",
    "hops.dispatch.in.finished=reward",
    "hops.batch={use: hops.batch.withhold, in: {ready: buffer, score: buffer}}",
    "dims.withheld={mean: 0, max: 6}",
    "hops.advantage.in.withheld_score=batch",
    "hops.advantage.in.withheld_uid=batch",
    "run.steps=30",
)


@pytest.mark.parametrize("verify", [False, True])
def test_stale_members_are_withheld_and_their_groups_are_trained_without_them(
    tmp_path: Path, verify: bool
) -> None:
    """Case A10, through the whole ring: scores of those that are withheld cross, and their tokens do not."""
    done = run_toy(tmp_path, *WITHHOLD, verify=verify)
    ledger = summary(done.directory)["ledger"]
    assert done.steps == 30
    assert ledger["dropped"]["withheld"] > 0
    assert ledger["consumed"] == 30 * 6 - ledger["dropped"]["withheld"]
    assert max(one["lag_max"] for one in steps(done.directory)) <= 1


def test_an_option_that_reads_an_input_says_so_when_it_lacks_it() -> None:
    from tests.runtime.harness import TOY as RING

    (found,) = load(RING, ["hops.batch.with={stale: wait}"]).diagnostics
    assert found.code == "FG110"
    assert found.message == "hop batch lacks its input sent, which stale: wait reads"
    assert load(RING, ["hops.batch.with={stale: wait}", "hops.batch.in.sent=dispatch"]).diagnostics == []
    assert load(RING, ["hops.batch.with={stale: drop}"]).diagnostics == []


def test_scores_that_are_withheld_must_be_read() -> None:
    from tests.runtime.harness import TOY as RING

    wires = ("hops.advantage.in.withheld_score=batch", "hops.advantage.in.withheld_uid=batch")
    found = load(RING, [one for one in WITHHOLD if one not in wires]).diagnostics
    assert [(d.code, d.help) for d in found] == [
        ("FG110", "add withheld_score: batch under in: of advantage"),
        ("FG110", "add withheld_uid: batch under in: of advantage"),
    ]
    assert load(RING, WITHHOLD).diagnostics == []
