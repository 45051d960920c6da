"""A learner of two real processes: it trains as one does, and when one of them is gone the run ends by its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import flowgraph
from tests.engines.tiny_llama import SIZES, save_model
from tests.runtime.harness import metrics
from tests.runtime.test_signals import await_end, session_members

pytestmark = pytest.mark.slow
GRAPH = Path(__file__).parent / "ranked.yaml"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    where = tmp_path_factory.mktemp("ranked")
    model = save_model(where / "model", LlamaConfig(**SIZES, tie_word_embeddings=True))
    (model / "tokenizer_config.json").write_text("{}")
    (where / "ranked.yaml").write_text(GRAPH.read_text().replace("MODEL", str(model)))
    return where / "ranked.yaml"


@pytest.mark.parametrize(
    "more",
    [{"dims.group": 1, "dims.sample": 7}, {"hops.train.with.minibatches": 2}],
    ids=["B1", "minibatches"],
)
def test_two_processes_train_as_one_does(graph: Path, tmp_path: Path, more: dict[str, int]) -> None:
    """B1: of seven trajectories one takes four and one three. B6: the values of each token come back to its place."""
    import torch
    from safetensors.torch import load_file

    found = []
    for processes in (1, 2):
        sets = {"owners.trainer.processes": processes, "owners.trainer.learner.optimizer": "sgd"}
        done = flowgraph.run(graph, runs=tmp_path / str(processes), overrides=sets | more, live=False)
        found.append((metrics(done.directory), load_file(Path(done.directory, "model", "model.safetensors"))))
    (one, weights), (two, others) = found
    for before, after in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "tokens", "rows", "entropy"):
            assert after[f"train.{name}"] == pytest.approx(before[f"train.{name}"], rel=1e-5, abs=1e-6), name
        assert after["look.moved"] == pytest.approx(before["look.moved"], abs=1e-5)
        # A row in another's place would change this by its moves, of a hundredth each, times its distance.
        assert after["look.placed"] == pytest.approx(before["look.placed"], abs=2e-3)
        assert after["look.moved"] > 1e-4, "the step changed something"
    assert weights.keys() == others.keys()
    start = load_file(graph.parent / "model" / "model.safetensors")
    off = sum(float((weights[name] - others[name]).square().sum()) for name in weights)
    moved = sum(float((weights[name] - start[name]).square().sum()) for name in weights)
    assert off <= 1e-8 * moved, "1e-4 of the update"
    assert isinstance(next(iter(weights.values())), torch.Tensor)


# --- a process that is gone --------------------------------------------------------------------------------------


def start(graph: Path, tmp_path: Path, *sets: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "flowgraph.cli",
        "run",
        str(graph),
        "--runs",
        str(tmp_path / "runs"),
        "--plain",
    ]
    for one in ("owners.trainer.processes=2", "run.steps=100000", *sets):
        command += ["--set", one]
    (tmp_path / "temporary").mkdir()
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )


def rank_one(tmp_path: Path, process: subprocess.Popen[str]) -> int:
    """The process of rank 1, once a step is made."""
    deadline = time.monotonic() + 120
    while not any('"step"' in path.read_text() for path in tmp_path.glob("runs/*/*/metrics.jsonl")):
        assert time.monotonic() < deadline, "no step in 120 s"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (found,) = [int(p) for p in children if os.readlink(f"/proc/{p}/fd/1").endswith("trainer.1.log")]
    return found


@pytest.fixture
def before() -> Iterator[None]:
    shared = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("stopped", [0.0, 0.7])
def test_a_rank_that_is_killed_in_a_step_ends_the_run_by_name(
    graph: Path, tmp_path: Path, stopped: float
) -> None:
    """stopped: seconds for which it does nothing before, so that the other waits for it."""
    process = start(graph, tmp_path)
    rank = rank_one(tmp_path, process)
    if stopped:
        os.kill(rank, signal.SIGSTOP)
        time.sleep(stopped)
    os.kill(rank, signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert f"error[FG903] the worker of owner trainer, rank 1 (pid {rank}) was killed by signal 9" in output
    assert process.returncode == 1
    await_end(process.pid)
    assert not session_members(process.pid)
    assert not list((tmp_path / "temporary").glob("flowgraph-*"))


@pytest.mark.usefixtures("before")
def test_a_rank_that_hangs_ends_the_run_within_its_deadline(graph: Path, tmp_path: Path) -> None:
    process = start(graph, tmp_path, "run.deadline=90")
    rank = rank_one(tmp_path, process)
    os.kill(rank, signal.SIGSTOP)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 1
    assert "error[FG90" in output
    assert "rank 1" in output
    await_end(process.pid)
    assert not list((tmp_path / "temporary").glob("flowgraph-*"))
