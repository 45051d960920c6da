"""Rings that once lost rows, leaked slots, read what was freed, or stood still: each is a claim now."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgraph.errors import DeadlineError, HopError, MemoryShort, PayloadError, RunError, WorkerDied
from flowgraph.ir.graph import Graph
from flowgraph.plan.compile import compile_file, compile_graph
from flowgraph.plan.plan import Plan
from flowgraph.runtime.ring import Ring
from flowgraph.runtime.view import LiveView
from tests.runtime.harness import TOY, metrics, only_run, run_toy, steps, summary
from tests.runtime.test_ring import Collector, run_inproc

USERS = "tests.runtime.users"
LOOK = f"hops.look={{use: {USERS}.look, in: {{tokens: rollout, leaf_offsets: rollout}}, with: {{%s}}}}"
COMPARE = (
    f"hops.compare={{use: {USERS}.compare, "
    "in: {tokens: batch, seen: look, words: look, notes: look, leaf_offsets: batch}}"
)
BEFORE = (
    "hops.reward.in={tokens: rollout, leaf_offsets: rollout, ground_truth: rollout}",
    "hops.buffer.in.trajectory=reward",
    "hops.dispatch.in.finished=reward",
)


def live(ring: Ring) -> dict[str, int]:
    return {hop: slots.live for hop, slots in ring.table.homes.items() if slots.live}


def values(told: Collector, name: str) -> list[object]:
    return [step[name] for step in told.steps if name in step]


# --- drops -------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.integers(1, 3),
    samples=st.integers(1, 4),
    max_lag=st.integers(1, 3),
    share=st.sampled_from([0.1, 0.4]),
    target=st.sampled_from([None, 1, 3]),
    extra=st.integers(0, 3),
    n=st.integers(3, 7),
)
def test_stragglers_are_dropped_and_replaced_and_every_step_is_made(
    groups: int, samples: int, max_lag: int, share: float, target: int | None, extra: int, n: int
) -> None:
    batch = groups * samples
    extra = min(extra, max_lag * batch)  # what a check admits, as for the target
    ring, told = run_inproc(
        f"dims.group={groups}",
        f"dims.sample={samples}",
        f"hops.dispatch.in.version.max_lag={max_lag}",
        f"hops.dispatch.with={{target: {min(target, (max_lag + 1) * batch) if target else 'null'}}}",
        f"hops.buffer.with={{capacity: {batch + extra}}}",
        f"hops.rollout={{use: {USERS}.straggle, in: {{prompt: dispatch, key: dispatch}}, with: {{share: {share}}}}}",
        f"run.steps={n}",
    )
    counts = ring.ledger.counts
    assert counts.consumed == batch * n
    assert counts.dispatched == counts.consumed + sum(counts.dropped.values())
    assert all(0 <= int(s["lag_max"]) <= max_lag for s in told.steps)  # type: ignore[call-overload]
    held = [int(s["in_flight"]) + int(s["ready"]) for s in told.steps]  # type: ignore[call-overload]
    assert max(held) <= batch + extra
    assert set(live(ring)) <= {"train", "dataset", "dispatch", "rollout"}


def test_drops_really_happen_and_come_in_whole_groups() -> None:
    ring, _ = run_inproc(
        "hops.dispatch.in.version.max_lag=1",
        f"hops.rollout={{use: {USERS}.straggle, in: {{prompt: dispatch, key: dispatch}}}}",
        "hops.rollout.with={share: 0.1, seconds: 0.5}",
        "run.steps=12",
    )
    assert ring.ledger.counts.dropped["stale"] >= 3
    assert all(one.place == "dropped" for one in ring.table.live["trajectory"].values())


# --- rows beside the ring ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 0.02])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_hop_beside_the_ring_is_done_before_its_trajectory_is_trained(max_lag: int, seconds: float) -> None:
    ring, told = run_inproc(
        f"hops.dispatch.in.version.max_lag={max_lag}",
        LOOK % f"seconds: {seconds}",
        COMPARE,
    )
    for name in ("difference", "notes", "lists"):
        assert values(told, f"compare.{name}") == [0.0] * 6
    assert "look" not in live(ring)


def test_a_slow_hop_on_steps_holds_the_versions_back_and_not_the_memory_over() -> None:
    ring, told = run_inproc(
        "hops.dispatch.in.version.max_lag=2",
        "hops.rollout.with.jitter=0",
        f"hops.look={{use: {USERS}.watch_step, owner: rollout, in: {{tokens: batch}}, with: {{seconds: 0.02}}}}",
        "run.steps=10",
    )
    assert ring.ledger.counts.consumed == 60
    assert max(values(told, "lag_max")) <= 2  # type: ignore[type-var]


@pytest.mark.parametrize("wiring", ["between", "beside"])
def test_a_hop_on_groups_comes_before_their_trajectories(wiring: str) -> None:
    sets = [
        f"hops.look={{use: {USERS}.hint, in: {{prompt: dataset}}}}",
        f"hops.rollout={{use: {USERS}.hinted, in: {{prompt: dispatch, key: dispatch, hint: look}}}}",
    ]
    sets += ["hops.dispatch.in.group=look"] if wiring == "between" else []
    ring, _ = run_inproc(*sets)
    assert ring.ledger.counts.consumed == 36
    assert ring.table.next_key["group"] <= 15


def test_a_queue_of_groups_waits_for_memory() -> None:
    ring, _ = run_inproc("hops.dataset.capacity=50")
    assert ring.ledger.counts.consumed == 36


# --- every, versions and lifetimes ---------------------------------------------------------------------------------


def test_what_follows_a_skipped_hop_is_skipped_too() -> None:
    _, told = run_inproc(
        "hops.sync.in.weights={from: train, every: 2}",
        "hops.dispatch.in.version.max_lag=1",
        f"hops.after={{use: {USERS}.after_sync, in: {{batch_id: sync, weights: train}}}}",
    )
    assert values(told, "after.step") == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_weights_that_nobody_publishes_free_their_slot(every: int) -> None:
    ring, _ = run_inproc(
        f"hops.sync.in.weights={{from: train, every: {every}}}",
        f"hops.dispatch.in.version.max_lag={every - 1}",
        "run.steps=12",
    )
    assert live(ring).get("train", 0) <= 1


def test_a_lifetime_that_outlasts_the_row_does_not_fill_the_arena() -> None:
    ring, _ = run_inproc(
        f"hops.keep={{use: {USERS}.keep, in: {{tokens: rollout}}}}",
        LOOK % "",
        COMPARE,
        "hops.compare.in.seen=keep.out",
        "run.steps=8",
    )
    assert "keep" not in live(ring)


def test_what_is_read_every_second_step_is_priced_so() -> None:
    sets = ("hops.sync.in.weights={from: train, every: 2}", "hops.dispatch.in.version.max_lag=1")
    ring, _ = run_inproc(*sets)
    fields = {f.port: f for seam in ring.plan.seams if seam.reader == "sync" for f in seam.fields}
    assert fields["batch_id"].mean_bytes == ring.meter.read["sync.batch_id"] / 6 == 4


def test_a_sampled_value_reaches_a_hop_on_rows(tmp_path: Path) -> None:
    add = f"hops.look={{use: {USERS}.with_version, in: {{tokens: batch, version: {{from: sync, delay: 1}}}}}}"
    one = run_toy(tmp_path / "a", add, executor="inproc")
    two = run_toy(tmp_path / "b", add, executor="processes")
    assert steps(one.directory) == steps(two.directory)
    assert [s["look.version"] for s in steps(one.directory)] == [0, 1, 2, 3, 4, 5]


# --- odd hops --------------------------------------------------------------------------------------------------------


def test_an_async_hop_may_live_on_the_driver(tmp_path: Path) -> None:
    add = f"hops.look={{use: {USERS}.nowhere, in: {{tokens: rollout}}}}"
    assert steps(run_toy(tmp_path / "a", add).directory)
    assert steps(run_toy(tmp_path / "b", add, executor="processes").directory)


def test_a_fold_may_give_nothing() -> None:
    ring, _ = run_inproc(f"hops.look={{use: {USERS}.counter, in: {{trajectory: rollout}}}}")
    assert ring.folds.all["look"].state.rows == 36


def test_two_folds_may_take_the_same_rows_and_give_them_as_any_sequence() -> None:
    ring, _ = run_inproc(
        f"hops.look={{use: {USERS}.taker, in: {{trajectory: rollout}}}}",
        f"hops.batch={{use: {USERS}.batch_of_tuples, in: {{ready: shown}}}}",
        f"hops.shown={{use: {USERS}.show_as_list, in: {{ready: buffer}}}}",
    )
    assert ring.folds.all["look"].state.rows == 36
    assert ring.ledger.counts.consumed == 36


@pytest.mark.parametrize(
    ("use", "what"),
    [("shows_a_number", "gave ready as int, and its port is rows"), ("shows_nothing", "gave no ready")],
)
def test_a_fold_that_gives_what_it_did_not_promise_is_named(use: str, what: str) -> None:
    with pytest.raises(PayloadError, match=f"fold shown {what}"):
        run_inproc(f"hops.shown={{use: {USERS}.{use}, in: {{ready: buffer}}}}")


@pytest.mark.parametrize("executor", ["inproc", "processes"])
def test_a_hop_that_exits_or_is_cancelled_within_is_named(tmp_path: Path, executor: str) -> None:
    for i, (hop, error) in enumerate(
        [("gives_up, with: {how: exit}", "SystemExit: 3"), ("cancelled", "CancelledError")]
    ):
        add = f"hops.look={{use: {USERS}.{hop}, in: {{tokens: batch}}}}"
        with pytest.raises(HopError, match=f"hop look: {error}"):
            run_toy(tmp_path / str(i), add, executor=executor)  # type: ignore[arg-type]


def test_a_list_of_another_length_than_its_dim_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"hop look: leaf\+1 is 3 with leaf=3"):
        run_inproc(
            LOOK % "lists: 1",
            COMPARE,
        )


# --- reward before the buffer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["inproc", "processes"])
def test_a_reward_before_the_buffer_gives_the_same_steps(tmp_path: Path, executor: str) -> None:
    after = run_toy(tmp_path / "a")
    before = run_toy(tmp_path / "b", *BEFORE, executor=executor)  # type: ignore[arg-type]
    one, two = steps(after.directory), steps(before.directory)
    assert [s["train.loss"] for s in one] == [s["train.loss"] for s in two]
    assert [s["reward.reward"] for s in one] == pytest.approx([s["reward.reward"] for s in two])


# --- the run directory, workers and their ends -----------------------------------------------------------------------


def test_a_run_directory_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't write the run directory .*: Not a directory"):
        run_toy(tmp_path / "file")


def test_a_run_without_memory_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowgraph.runtime.transport.available", lambda: 1000)
    said = r"error\[FG908\] the arenas take \S+ KB, and 1.00 KB of memory are available\n  help: lower dims"
    with pytest.raises(MemoryShort, match=said):
        run_toy(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_live_view_shows_what_is_no_number() -> None:
    view = LiveView(compile_file(TOY))
    view.step({"step": 1, "step_seconds": 0.1, "reward.reward": float("nan")})
    view.step({"step": 2, "step_seconds": 0.1, "reward.reward": 1.0})
    view.close()


def test_metrics_are_json_whatever_a_hop_measures(tmp_path: Path) -> None:
    done = run_toy(tmp_path, f"hops.look={{use: {USERS}.not_finite, in: {{tokens: batch}}}}", "run.steps=1")
    (line,) = [
        t for t in (Path(done.directory) / "metrics.jsonl").read_text().splitlines() if "look.nan" in t
    ]
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name))["look.nan"] is None


def test_a_worker_with_a_long_log_ends_with_a_short_message(tmp_path: Path) -> None:
    add = f"hops.look={{use: {USERS}.loud, in: {{tokens: batch}}, with: {{die: true}}}}"
    with pytest.raises(WorkerDied, match="ended with exit code 5") as caught:
        run_toy(tmp_path, add, executor="processes")
    assert len(str(caught.value)) < 5000


def test_a_worker_that_closes_its_socket_is_named(tmp_path: Path) -> None:
    add = f"hops.look={{use: {USERS}.hangs_up, in: {{tokens: batch}}}}"
    with pytest.raises(WorkerDied, match=r"owner trainer .* closed its connection"):
        run_toy(tmp_path, add, executor="processes")


@pytest.mark.parametrize("executor", ["inproc", "processes"])
def test_an_owner_that_cant_start_is_named(
    tmp_path: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower_wrongly(graph: Graph, **_: object) -> Plan:
        plan = compile_graph(graph)
        train = msgspec.structs.replace(plan.hops["train"], use="tests.runtime.toy.missing")
        return msgspec.structs.replace(plan, hops={**plan.hops, "train": train})

    monkeypatch.setattr("flowgraph.runtime.run.compile_graph", lower_wrongly)
    with pytest.raises(HopError, match="owner trainer could not start: ImportError"):
        run_toy(tmp_path, executor=executor)  # type: ignore[arg-type]
    assert summary(only_run(tmp_path))["status"] == "failed"


def test_a_worker_that_stands_still_is_named_at_its_deadline(tmp_path: Path) -> None:
    add = f"hops.look={{use: {USERS}.stops_itself, in: {{tokens: batch}}}}"
    with pytest.raises(DeadlineError, match=r"hop look \(step 1\) on owner trainer has run for 3 s"):
        run_toy(tmp_path, add, "run.deadline=3", executor="processes")


def test_the_last_weights_are_published_though_every_does_not_divide_the_steps(tmp_path: Path) -> None:
    sets = (
        "hops.sync.in.weights={from: train, every: 3}",
        "hops.dispatch.in.version.max_lag=2",
        "run.steps=4",
    )
    done = run_toy(tmp_path, *sets)
    assert [r["eval.version"] for r in metrics(done.directory) if "eval.version" in r] == [0, 4]
