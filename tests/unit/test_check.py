"""What each check accepts and refuses, beyond the one example that tests/diagnostics shows of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgraph.ir.graph import is_offsets, joins
from flowgraph.passes.pipeline import Loaded, load
from flowgraph.passes.sizes import dim_values, rows_per_step
from flowgraph.spec.dims import Size, parse
from tests.runtime.virtual import ENGINE
from tests.unit.graphs import RING, SMALL, codes, loaded, span

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests/runtime/toy.yaml"


@pytest.mark.parametrize(
    ("dim", "joined", "offsets"),
    [
        ("token", True, False),
        ("leaf", True, False),
        ("2*token", True, False),
        ("leaf+token", True, False),
        ("leaf+1", True, True),
        ("2*leaf+1", False, False),
        ("leaf+2", False, False),
        ("leaf*token", False, False),
        ("prompt", False, False),
        ("4", False, False),
        ("0", False, False),
    ],
)
def test_values_are_joined_along_a_dim_that_adds_up(dim: str, joined: bool, offsets: bool) -> None:
    assert joins(parse(dim)) == joined
    assert (joins(parse(dim)) and is_offsets(parse(dim))) == offsets


def test_a_step_counts_the_leaves_and_tokens_of_all_its_trajectories() -> None:
    dims = {
        "group": Size(2, 2),
        "sample": Size(3, 3),
        "leaf": Size(1.5, 2),
        "prompt": Size(4, 8),
        "response": Size(2, 4),
    }
    assert rows_per_step("trajectory", dims) == 6
    one, whole = dim_values("trajectory", dims, "max"), dim_values("step", dims, "max")
    assert (one["trajectory"], one["leaf"], one["token"]) == (1, 2, 24)
    assert (whole["trajectory"], whole["leaf"], whole["token"]) == (6, 12, 144)
    assert dim_values("step", dims, "mean")["token"] == 6 * 1.5 * 6


def test_two_cycles_are_two_findings_each_at_its_own_back_edge(tmp_path: Path) -> None:
    hops = RING.replace("delay: 1, ", "") + f"  more: {{use: {SMALL}.total, in: {{score: more}}}}\n"
    assert codes(tmp_path, hops) == ["FG401 sync", "FG401 more"]


def test_a_cycle_written_in_any_order_is_cut_where_the_version_is_read(tmp_path: Path) -> None:
    hops = "".join(reversed(RING.replace("delay: 1, ", "").splitlines(keepends=True)))
    (found,) = loaded(tmp_path, hops).diagnostics
    assert found.message == "the cycle split → batch → count → total → sync → split has no delay"
    assert "version: {from: sync, delay: 1" in found.help


def test_a_hop_that_reads_itself_is_a_cycle(tmp_path: Path) -> None:
    assert codes(tmp_path, RING.replace("score: count", "score: total")) == ["FG401 total"]


CHECKED_EARLY = (
    "hops.reward.in={tokens: rollout, leaf_offsets: rollout, ground_truth: rollout}",
    "hops.buffer.in.trajectory=reward",
    "hops.dispatch.in.finished=reward",
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["hops.rollout.in.prompt=advantage"], "read it before rollout: prompt: dispatch"),
        (
            ["hops.rollout.in.prompt=advantage.advantages"],
            "only a version leads back; read prompt from a hop before rollout",
        ),
        (
            ["hops.buffer.in.trajectory=reward"],
            "only a version leads back; read trajectory from a hop before buffer",
        ),
        (["hops.batch.in.score=batch"], "move reward before buffer"),
        ([*CHECKED_EARLY, "hops.batch.in.score=batch"], "read it before batch: score: buffer"),
    ],
)
def test_rows_that_lead_back_are_read_where_they_come_from(overrides: list[str], expected: str) -> None:
    (found,) = load(str(RUNS), overrides).diagnostics
    assert found.code == "FG401"
    assert expected in found.help


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hops.dispatch.in.version=train", "read version from sync; train gives "),
        ("hops.dispatch.in.free=train", "read free from buffer; train gives "),
        ("hops.buffer.in.trajectory=dataset", "name a hop that gives trajectory rows; dataset gives "),
    ],
)
def test_a_hop_that_gives_no_such_thing_is_told_from_the_one_that_does(override: str, expected: str) -> None:
    (found,) = load(str(RUNS), [override]).diagnostics
    assert found.code == "FG109"
    assert found.help.startswith(expected)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("hops.rolout.in.key=dispatch", "hops.rollout"),
        ("hop.rollout.in.key=dispatch", "hops"),
        ("hops.rollout.inn.key=dispatch", "in"),
        ("hops.rollout.in.promt=dispatch", "prompt"),
        ("hops.rollout.with.jiter=1", "jitter"),
        ("run.step=5", "steps"),
        ("dims.promt=5", "prompt"),
        ("owners.trainr.threads=2", "trainer"),
    ],
)
def test_an_override_of_nothing_is_told_what_is_there(override: str, meant: str) -> None:
    first, *_ = load(str(RUNS), [override]).diagnostics
    assert first.place.file == "--set"
    assert first.help.startswith(f"did you mean {meant}? ")


def test_rows_can_not_be_delayed(tmp_path: Path) -> None:
    assert codes(tmp_path, RING.replace("score: count", "score: {from: count, delay: 1}")) == ["FG401 count"]
    hops = RING.replace("key: batch", "key: {from: total, delay: 1}")
    assert codes(tmp_path, hops) == ["FG401 total"]


def test_rows_of_the_wrong_kind_do_not_make_everything_behind_them_wrong(tmp_path: Path) -> None:
    pool = f"  pool: {{use: {SMALL}.pool, in: {{trajectory: split}}, with: {{places: 8}}}}\n"
    hops = RING.replace("small.batch, in: {trajectory: split}", "small.batch_of_waiting, in: {waiting: pool}")
    hops = hops.replace("  batch:", pool + "  batch:")
    assert codes(tmp_path, hops) == []
    for other, code in (("sync", "FG401"), ("source", "FG109"), ("nobody", "FG108")):
        assert codes(tmp_path, hops.replace("trajectory: split", f"trajectory: {other}")) == [
            f"{code} {other}"
        ]


def test_one_missing_owner_is_one_finding_however_many_hops_have_the_role(tmp_path: Path) -> None:
    train = f"  train: {{use: {SMALL}.train, in: {{batch_id: batch}}}}\n"
    assert codes(tmp_path, RING + train + train.replace("train:", "again:", 1)) == ["FG301 train"]


def test_two_hops_that_train_one_learner_are_two_writers(tmp_path: Path) -> None:
    train = f"  train: {{use: {SMALL}.train, in: {{batch_id: batch}}}}\n"
    top = "owners: {trainer: {learner: {use: torch, model: smollm2-135m, lr: 1e-5}}}\n"
    assert codes(tmp_path, RING + train, top=top) == []
    assert codes(tmp_path, RING + train + train.replace("train:", "again:", 1), top=top) == ["FG302 again"]


def test_sizes_that_are_all_missing_are_one_finding(tmp_path: Path) -> None:
    (found,) = loaded(tmp_path, dims="").diagnostics
    assert found.code == "FG204"
    assert "prompt, group, sample" in found.message


@pytest.mark.parametrize(
    ("capacity", "every", "expected"), [(0, 1, []), (1, 2, []), (2, 1, ["FG402 2"]), (0, 3, ["FG402 total"])]
)
def test_the_queue_and_the_sync_stay_within_max_lag(
    tmp_path: Path, capacity: int, every: int, expected: list[str]
) -> None:
    hops = RING.replace("batch, in: {traj", f"batch, capacity: {capacity}, in: {{traj")
    hops = hops.replace("batch_id: total", f"batch_id: {{from: total, every: {every}}}")
    assert codes(tmp_path, hops) == expected


@pytest.mark.parametrize(("places", "expected"), [(8, []), (7, ["FG404 7"]), (0, ["FG111 0"])])
def test_a_pool_holds_at_least_one_batch(tmp_path: Path, places: int, expected: list[str]) -> None:
    pool = f"  pool: {{use: {SMALL}.pool, in: {{trajectory: split}}, with: {{places: {places}}}}}\n"
    hops = (
        RING.replace("small.batch, in: {trajectory: split}", "small.batch_of_waiting, in: {waiting: pool}")
        + pool
    )
    assert codes(tmp_path, hops) == expected


TOY = RUNS.read_text()
AFTER = "in: { tokens: batch, leaf_offsets: batch, ground_truth: batch }"
BEFORE = AFTER.replace("batch", "rollout")
FINISHED = ("finished: rollout", "finished: reward")
POLICY = "in: { ready: buffer, score: buffer }, with: { drop_equal: true }"


SKIPS = ["FG406 rollout", "FG406 rollout", "FG406 batch", "FG406 batch", "FG406 batch"]


def toy(tmp_path: Path, *edits: tuple[str, str]) -> Loaded:
    text = TOY
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "graph.yaml").write_text(text)
    return load(str(tmp_path / "graph.yaml"))


def test_reward_before_the_buffer_and_after_the_batch_both_compile(tmp_path: Path) -> None:
    moved = ((AFTER, BEFORE), ("trajectory: rollout", "trajectory: reward"), FINISHED)
    for edits in ((), ((AFTER, BEFORE),), moved, (*moved, ("in: { ready: buffer }", POLICY))):
        assert toy(tmp_path, *edits).diagnostics == []


def test_the_move_that_a_batch_policy_is_told_of_mends_it(tmp_path: Path) -> None:
    (found,) = toy(tmp_path, ("in: { ready: buffer }", POLICY)).diagnostics
    reward = "in: {tokens: rollout, leaf_offsets: rollout, ground_truth: rollout}"
    told = "buffer in: {trajectory: reward}, dispatch in: {finished: reward}"
    assert found.help.endswith(f"move reward before buffer: reward {reward}, {told}")
    mended = (
        (AFTER, reward),
        ("trajectory: rollout", "trajectory: reward"),
        FINISHED,
        ("in: { ready: buffer }", POLICY),
    )
    assert toy(tmp_path, *mended).diagnostics == []


def test_a_column_that_a_later_hop_gives_is_read_there(tmp_path: Path) -> None:
    (found,) = toy(tmp_path, ("score: reward,", "score: batch,")).diagnostics
    assert found.help == "reward gives score, but only after batch; read it there: score: reward"


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (
            [(AFTER, BEFORE.replace("tokens: rollout", "tokens: { from: rollout, every: 2 }"))],
            ["FG406 reward"],
        ),
        ([("lag: batch", "lag: { from: batch, every: 2 }")], ["FG402 batch"]),
        ([("lag: batch", "lag: { from: batch, every: 2 }"), ("max_lag: 0", "max_lag: 1")], []),
        ([("key: dispatch }", "key: { from: dispatch, every: 2 } }")], SKIPS),
        ([("trajectory: rollout", "trajectory: reward"), (AFTER, BEFORE)], ["FG406 rollout"]),
        ([("taken: batch", "taken: train")], []),
        ([("free: buffer, dropped: batch", "free: buffer")], ["FG306 dispatch"]),
        ([("free: buffer", "free: { from: buffer, every: 3 }")], ["FG406 buffer"]),
        ([("taken: batch, dropped: batch }", "taken: batch, dropped: batch }, with: { capacity: 6 }")], []),
        (
            [("taken: batch, dropped: batch }", "taken: batch, dropped: batch }, with: { capacity: 7 }")],
            ["FG402 7"],
        ),
        ([("  rollout: {", "  spare: { use: tests.runtime.toy.numbers }\n  rollout: {")], ["FG406 spare"]),
    ],
)
def test_what_is_made_is_taken_and_what_is_kept_is_let_go(
    tmp_path: Path, edits: list[tuple[str, str]], expected: list[str]
) -> None:
    found = toy(tmp_path, *edits)
    said = [f"{d.code} {span(found.sources[d.place.file], d.place)}" for d in found.diagnostics]
    assert said == expected


def test_the_time_of_a_trajectory_ends_before_the_deadline_of_the_run() -> None:
    """Case S12: else one that hangs ends the run, and not its group."""
    graph = str(Path(__file__).parents[2] / "graphs/multiturn.yaml")
    assert load(graph).diagnostics == []
    for override in ("hops.rollout.with.time_limit=1000", "run.deadline=60"):
        (found,) = load(graph, [override]).diagnostics
        assert (found.code, "set time_limit below" in found.help) == ("FG111", True)


@pytest.mark.parametrize("wire", ["rollout", "buffer"])
def test_a_batch_is_told_of_what_is_sent_by_whoever_sends_it(wire: str) -> None:
    """Else what is in flight is not known, and waiting for it is waiting for ever."""
    (found,) = load(str(RUNS), [f"hops.batch.in.sent={wire}", "hops.batch.with={stale: wait}"]).diagnostics
    assert (found.code, found.help) == ("FG406", "write sent: dispatch")
    (missing,) = load(str(RUNS), ["hops.batch.with={stale: wait}"]).diagnostics
    assert missing.help == "add sent: dispatch under in:"


def test_the_fix_of_a_backlog_that_leads_back_without_a_delay_works() -> None:
    (found,) = load(str(RUNS), [*ENGINE, "hops.dispatch.in.backlog=rollout"]).diagnostics
    assert found.help == "write the back edge as backlog: {from: rollout, delay: 1}"
    assert load(str(RUNS), [*ENGINE, "hops.dispatch.in.backlog={from: rollout, delay: 1}"]).diagnostics == []


def test_a_wrong_option_of_the_dispatcher_is_one_finding() -> None:
    overrides = ["hops.dispatch.in.version.max_lag=2", "hops.dispatch.in.short=batch"]
    wrong = "hops.dispatch.with={adapt: true, least: 9, target: 7}"
    assert [d.code for d in load(str(RUNS), [*overrides, wrong]).diagnostics] == ["FG111"]


def test_a_size_of_the_model_that_it_does_not_have_is_refused_and_one_that_it_has_is_not() -> None:
    loaded = load(str(ROOT / "graphs/moe_r3.yaml"), ["dims.top_k=3", "dims.experts=32"])
    (found,) = loaded.diagnostics
    assert found.code == "FG207"
    assert found.message == "dims.top_k is 3, and tiny-moe has 2"
    assert found.help.startswith("remove top_k: from dims:")
