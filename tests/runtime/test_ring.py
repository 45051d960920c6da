"""The ring on both executors: equal outputs, conservation, lag bounds, freed memory, and failures by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgraph.errors import DeadlineError, HopError, PayloadError, RunError, WorkerDied
from flowgraph.passes.pipeline import load
from flowgraph.plan.compile import compile_graph
from flowgraph.runtime.executors import InProcess, environment
from flowgraph.runtime.ring import Ring
from flowgraph.runtime.transport import arenas
from tests.runtime.harness import TOY, metrics, only_run, run_toy, steps, summary


class Collector:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[dict[str, object]] = []
        self.events: list[dict[str, object]] = []

    def step(self, record: dict[str, object]) -> None:
        self.steps.append(record)

    def event(self, record: dict[str, object]) -> None:
        self.events.append(record)


def run_inproc(*overrides: str) -> tuple[Ring, Collector]:
    loaded = load(TOY, overrides)
    assert not loaded.diagnostics, loaded.diagnostics
    assert loaded.graph is not None
    plan = compile_graph(loaded.graph)
    collector, executor = Collector(), InProcess()
    with arenas(plan, alone=True) as memory:
        ring = Ring(plan, executor, {}, memory, collector)
        try:
            executor.start(plan, {}, memory)
            ring.start()
            ring.run()
        finally:
            executor.stop(0)
    return ring, collector


def test_both_executors_give_equal_steps(tmp_path: Path) -> None:
    one = run_toy(tmp_path / "a", executor="inproc")
    two = run_toy(tmp_path / "b", executor="processes")
    assert steps(one.directory) == steps(two.directory)
    assert len(steps(one.directory)) == 6


def test_rows_keep_their_own_ground_truth(tmp_path: Path) -> None:
    """The toy reward of a leaf is its token sum plus its group's number, so a lost or swapped row changes the mean."""
    slow = run_toy(tmp_path / "a", "hops.rollout.with.jitter=0.05")
    fast = run_toy(tmp_path / "b", "hops.rollout.with.jitter=0")
    assert [s["reward.reward"] for s in steps(slow.directory)] == [
        s["reward.reward"] for s in steps(fast.directory)
    ]


def test_another_seed_gives_other_samples(tmp_path: Path) -> None:
    one = run_toy(tmp_path / "a")
    two = run_toy(tmp_path / "b", "run.seed=4")
    assert [s["train.loss"] for s in steps(one.directory)] != [s["train.loss"] for s in steps(two.directory)]


def test_evaluation_sees_version_zero_every_second_and_the_last(tmp_path: Path) -> None:
    done = run_toy(tmp_path, "run.steps=5")
    assert [r["eval.version"] for r in metrics(done.directory) if "eval.version" in r] == [0, 2, 4, 5]


def test_weights_that_cross_every_second_step_raise_the_version_by_two(tmp_path: Path) -> None:
    sets = (
        "hops.sync.in.weights={from: train, every: 2}",
        "hops.dispatch.in.version.max_lag=1",
        "run.steps=4",
    )
    done = run_toy(tmp_path, *sets)
    assert [r["eval.version"] for r in metrics(done.directory) if "eval.version" in r] == [0, 2, 4]
    assert [s["lag_max"] for s in steps(done.directory)] == [0, 1, 0, 1]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.integers(1, 3),
    samples=st.integers(1, 3),
    max_lag=st.integers(0, 3),
    n=st.integers(1, 5),
    target=st.sampled_from([None, 1, 2, 5]),
    jitter=st.sampled_from([0.0, 0.002]),
    queue=st.integers(0, 3),
)
def test_every_ring_conserves_bounds_lag_and_frees_its_memory(
    groups: int, samples: int, max_lag: int, n: int, target: int | None, jitter: float, queue: int
) -> None:
    most = (max_lag + 1) * groups * samples  # what a check admits
    ring, told = run_inproc(
        f"dims.group={groups}",
        f"dims.sample={samples}",
        f"hops.dispatch.in.version.max_lag={max_lag}",
        f"run.steps={n}",
        f"hops.rollout.with.jitter={jitter}",
        f"hops.batch.capacity={min(queue, max_lag)}",
        f"hops.dispatch.with={{target: {min(target, most) if target else 'null'}}}",
    )
    counts = ring.ledger.counts
    assert counts.consumed == groups * samples * n
    # One that others overtook may be too old when it comes at last; it is replaced. With max_lag 0 all are waited for.
    assert counts.dispatched == counts.consumed + counts.dropped.get("stale", 0)
    assert max_lag or not counts.dropped
    assert [s["step"] for s in told.steps] == list(range(1, n + 1))
    assert all(0 <= s["lag_max"] <= max_lag for s in told.steps)  # type: ignore[operator]
    live = {hop: slots.live for hop, slots in ring.table.homes.items() if slots.live}
    # What outlives a run: the published weights, and the last groups drawn: one queued, one held, one sampled last.
    assert set(live) <= {"train", "dataset"}
    assert live.get("train", 0) <= 2
    assert live.get("dataset", 0) <= 3


def test_a_hop_that_raises_is_named_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(
        HopError, match=r"hop rollout: ArithmeticError: prompt 5 .* \(trajectory \d+, uid 5\)"
    ):
        run_toy(tmp_path, "hops.rollout.with.fail_at=5", executor="processes")
    directory = only_run(tmp_path)
    assert summary(directory)["status"] == "failed"
    assert "Traceback" in (Path(directory) / "error.txt").read_text()


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    """Case S6: the producer dies, and the consumer gets a named error."""
    with pytest.raises(WorkerDied, match=r"owner rollout .* ended with exit code 7"):
        run_toy(tmp_path, "hops.rollout.with.die_at=5", executor="processes")


@pytest.mark.parametrize("executor", ["inproc", "processes"])
def test_a_hop_that_hangs_is_named_at_its_deadline(tmp_path: Path, executor: str) -> None:
    with pytest.raises(
        DeadlineError, match=r"hop rollout \(trajectory \d+, uid 5\) on owner rollout has run for 2 s"
    ):
        run_toy(tmp_path, "hops.rollout.with.hang_at=5", "run.deadline=2", executor=executor)  # type: ignore[arg-type]


def test_a_payload_beyond_its_bound_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match=r"hop rollout gave token=\d+, and the graph's bound is 16"):
        run_toy(tmp_path, "hops.rollout.with.too_long=90")


def test_a_payload_of_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        PayloadError, match=r"hop rollout gave tokens as float32\[\d+\], and its port is i32\[token\]"
    ):
        run_toy(tmp_path, "hops.rollout.with.wrong_dtype=true")


def test_a_dataset_that_ends_ends_the_run_with_all_that_fills_a_batch(tmp_path: Path) -> None:
    done = run_toy(tmp_path, "hops.dataset.with={rows: 7}")
    assert done.steps == 3
    assert summary(done.directory)["status"] == "exhausted"
    assert summary(done.directory)["ledger"]["dropped"] == {"run ended": 3}
    assert [r["eval.version"] for r in metrics(done.directory) if "eval.version" in r] == [0, 2, 3]


def test_a_dataset_without_one_batch_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing can fire at step 0: in flight 0, ready 3"):
        run_toy(tmp_path, "hops.dataset.with={rows: 1}")


def test_a_run_of_processes_imports_no_torch_in_the_driver(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from tests.runtime.harness import run_toy; "
        f"run_toy(Path({str(tmp_path)!r}), executor='processes'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_how_threads_of_a_worker_wait_is_the_users_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert environment() == {"GOMP_SPINCOUNT": "2000"}
    for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "7")):
        with monkeypatch.context() as only:
            only.setenv(name, value)
            assert environment() == {}
