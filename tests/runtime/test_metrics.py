"""What a run says of itself: lags, depths, drops by reason and idle shares, a step's and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flowgraph.cli import main
from tests.runtime.harness import TOY, metrics, run_toy, summary

TRAIN = "reward → advantage → train"
OVERLAP = ("hops.dispatch.in.version.max_lag=2", "hops.batch.capacity=1", "run.steps=8")


def records(directory: str) -> list[dict[str, Any]]:
    return [one for one in metrics(directory) if "lags" in one]


def test_a_synchronous_run_has_no_lag_of_either_kind_and_no_queue(tmp_path: Path) -> None:
    done = run_toy(tmp_path, "hops.train.with={seconds: 0.02}")
    for one in records(done.directory):
        assert one["lags"] == {"0": 6}
        assert (one["weights_lag"], one["queued"], one["dropped"]) == (0, 0, {})
        assert one["depths"]["queued"] == {"mean": 0, "max": 0}
        assert 0 < one["depths"]["in_flight"]["mean"] < one["depths"]["in_flight"]["max"] == 6
    whole = summary(done.directory)
    assert whole["lags"] == {"0": 36}
    assert done.lags == {0: 36}
    # One after the other: what one side is busy the other is idle, each for the reason that it has.
    shares = whole["shares"]["owners"]
    hops = whole["shares"]["hops"]
    assert hops["rollout"]["busy"] + hops[TRAIN]["busy"] + hops["sync"]["busy"] <= 1
    assert shares["rollout"]["blocked"] > 0.1 > shares["rollout"]["starved"]
    assert shares["trainer"]["starved"] > 0.1 > shares["trainer"]["blocked"]
    assert done.idle == {
        name: pytest.approx(1 - shares[name]["busy"], abs=2e-3) for name in ("rollout", "trainer")
    }


def test_shares_of_every_step_and_of_the_run_sum_to_one(tmp_path: Path) -> None:
    done = run_toy(tmp_path, *OVERLAP)
    for one in (*records(done.directory), summary(done.directory)):
        owners, hops = one["shares"]["owners"], one["shares"]["hops"]
        assert set(owners) == {"driver", "rollout", "trainer"}
        assert set(hops) == {"dataset", "dispatch", "rollout", "buffer", "batch", TRAIN, "sync", "eval"}
        assert all(sum(s.values()) == pytest.approx(1, abs=2e-3) for s in (*owners.values(), *hops.values()))


def test_a_slow_trainer_has_a_queue_and_blocks_the_rollout(tmp_path: Path) -> None:
    slow = ("hops.train.with={seconds: 0.1}", "hops.rollout.with.jitter=0")
    done = run_toy(tmp_path, *OVERLAP, *slow, executor="processes")
    lines, whole = records(done.directory), summary(done.directory)
    queued = whole["depths"]["queued"]
    assert queued["max"] == 1
    assert queued["mean"] > 0.3
    assert max(int(lag) for one in lines for lag in one["lags"]) <= 2
    total = {lag: sum(one["lags"].get(lag, 0) for one in lines) for lag in whole["lags"]}
    assert total == whole["lags"]
    assert sum(total.values()) == whole["ledger"]["consumed"]
    shares = whole["shares"]["owners"]
    assert shares["trainer"]["busy"] > 0.5
    assert shares["rollout"]["blocked"] > 0.5
    assert whole["busy_seconds"]["trainer"] > 8 * 0.1


def test_weights_that_are_not_published_yet_are_a_lag_of_their_own(tmp_path: Path) -> None:
    sets = (
        "hops.sync.in.weights={from: train, every: 2}",
        "hops.dispatch.in.version.max_lag=1",
        "run.steps=4",
    )
    done = run_toy(tmp_path, *sets)
    assert [one["weights_lag"] for one in records(done.directory)] == [0, 1, 0, 1]
    assert [one["lag_max"] for one in records(done.directory)] == [0, 1, 0, 1]


def test_the_screen_tells_ready_from_queue_and_ends_with_idle_shares_and_lags(tmp_path: Path) -> None:
    command = ["run", TOY, "--executor", "inproc", "--plain", "--runs", str(tmp_path), "--steps", "2"]
    printed = CliRunner().invoke(main, command).output.splitlines()
    steps = [line for line in printed if line.startswith("step ")]
    assert len(steps) == 2
    assert all("  lag 0  ready 0  queue 0  " in line for line in steps)
    idle, end = printed[-2:]
    assert idle.startswith("rollout idle ")
    assert "trainer idle " in idle
    assert idle.endswith("; lag 0: 100 %")
    assert end.startswith("2 steps in ")
