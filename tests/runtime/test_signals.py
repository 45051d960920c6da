"""Ctrl-C, SIGTERM and kill -9 at any moment leave no process, no shared memory and whole metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.harness import TOY, only_run, summary


def default_sigint() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(tmp_path: Path, executor: str = "processes") -> subprocess.Popen[str]:
    """A run that would take minutes, in a session of its own, as a terminal would start it."""
    command = [sys.executable, "-m", "flowgraph.cli", "run", TOY, "--runs", str(tmp_path)]
    command += ["--executor", executor, "--set", "run.steps=100000"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=default_sigint,
    )


def session_members(leader: int) -> list[str]:
    """Living processes of a session (zombies do not live)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except (OSError, IndexError):
                continue
    return found


def await_end(leader: int) -> None:
    deadline = time.monotonic() + 15
    while session_members(leader):
        assert time.monotonic() < deadline, f"still there: {session_members(leader)}"
        time.sleep(0.02)


def await_steps(tmp_path: Path) -> None:
    """Wait until the run has made a step, so that its workers are there."""
    deadline = time.monotonic() + 30
    while not any("lag_max" in path.read_text() for path in tmp_path.glob("toy/*/metrics.jsonl")):
        assert time.monotonic() < deadline, "no step in 30 s"
        time.sleep(0.05)


# From before the workers are started to the middle of the run.
MOMENTS = [0.05, 0.3, 0.6, 0.9, 1.2, 2.0, 3.0]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path, moment: float, how: signal.Signals) -> None:
    before = set(os.listdir("/dev/shm"))
    process = start(tmp_path)
    time.sleep(moment)
    if how is signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, how) if how is signal.SIGINT else process.terminate()
    output, _ = process.communicate(timeout=20)
    await_end(process.pid)
    assert set(os.listdir("/dev/shm")) <= before
    if how is not signal.SIGKILL and (tmp_path / "toy").exists():
        assert "Traceback" not in output  # before that, Python itself may still be importing
        directory = only_run(tmp_path)
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
        assert all(json.loads(line) for line in lines)
        if lines:
            assert summary(directory)["status"] == "interrupted"
            assert summary(directory)["steps"] == sum("lag_max" in json.loads(line) for line in lines)


@pytest.mark.parametrize("executor", ["processes", "inproc"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_in_its_middle_keeps_its_metrics(
    tmp_path: Path, how: signal.Signals, executor: str
) -> None:
    process = start(tmp_path, executor)
    await_steps(tmp_path)
    os.kill(process.pid, how)
    output, _ = process.communicate(timeout=20)
    await_end(process.pid)
    assert "Traceback" not in output
    directory = only_run(tmp_path)
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    assert any("lag_max" in line for line in lines)
    if how is not signal.SIGKILL:
        assert process.returncode == 130
        assert summary(directory)["status"] == "interrupted"


def test_ctrl_c_twice_still_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    await_steps(tmp_path)
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.01)
    process.communicate(timeout=20)
    await_end(process.pid)


def test_a_killed_worker_ends_the_run_by_name(tmp_path: Path) -> None:
    process = start(tmp_path)
    await_steps(tmp_path)
    workers = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "flowgraph.runtime.worker"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(workers) == 2
    os.kill(int(workers[0]), signal.SIGKILL)
    output, _ = process.communicate(timeout=20)
    await_end(process.pid)
    assert "error[FG903] the worker of owner" in output
    assert "was killed by signal 9" in output
    assert process.returncode == 1
