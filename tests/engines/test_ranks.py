"""Two real processes hold a learner between them, and compute what one does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experts import save_experts
from learner_rows import digest
from ranks_job import Found, run
from safetensors.torch import load_file
from torch import Tensor

from flowgraph.learners.ranks import ALONE, Ranks

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("ranks_job.py")
SGD = {"optimizer": "sgd", "clip": 1e6, "lr": 0.1}


def start(where: Path, of: int = 2, timeout: float = 200, **job: Any) -> dict[str, Found]:
    """Run a job on as many processes; what rank 0 found, by case. Each has ended, however, after this."""
    where.mkdir(exist_ok=True)
    file = where / "job.json"
    file.write_text(json.dumps({"out": str(where), **job}))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    processes = []
    for rank in range(of):
        with (where / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(JOB), str(rank), str(of), str(where / "store"), str(file)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    killed = [-9 if job.get("end") == "kill" and rank == 1 else 0 for rank in range(of)]
    assert codes == killed, "\n".join((where / f"{rank}.log").read_text() for rank in range(of))
    return {name: Found(**torch.load(where / f"{name}.pt", weights_only=False)) for name in job["cases"]}


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Relative norm of the difference, over all tensors."""
    assert one.keys() == other.keys()
    apart = torch.stack([torch.linalg.vector_norm((one[n] - other[n]).double()) for n in one])
    whole = torch.stack([torch.linalg.vector_norm(other[n].double()) for n in one])
    return float(torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(whole))


CASES: dict[str, dict[str, Any]] = {
    "tree": {"rows": "B4", "steps": 3, **SGD},
    "padded": {"rows": "B4", "steps": 3, "pack": "padded", "checkpoint": True, **SGD},
    "adamw": {"rows": "B4", "steps": 3},
    "L3": {"rows": "L3", "steps": 3, **SGD},
    "L4": {"rows": "L4", "steps": 3, **SGD},
    "B1": {"rows": "B1", "steps": 1, **SGD},
    "idle": {"rows": "idle", "steps": 1, **SGD},
    "nothing": {"rows": "nothing", "steps": 1, **SGD},
    "bfloat16": {"rows": "B4", "steps": 1, "dtype": "bfloat16"},
    "frozen": {"rows": "B4", "frozen": True, "lr": None},
    "critic": {"rows": "B4", "steps": 3, "critic": True, **SGD},
}
if find_spec("peft"):
    CASES["lora"] = {"rows": "B4", "steps": 3, "lora": {"rank": 4, "alpha": 8}, **SGD}


@pytest.fixture(scope="module")
def found(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Found], Path]:
    """All cases, and then rank 1 is killed in the middle of a step."""
    where = tmp_path_factory.mktemp("ranks")
    cases = {name: case | {"save": str(where / f"saved-{name}")} for name, case in CASES.items()}
    return start(where, model=str(tiny), cases=cases, end="kill", deadline=30), where


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, Found]:
    threads = torch.get_num_threads()
    try:
        return {name: run(str(tiny), case, ALONE) for name, case in CASES.items()}
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("case", ["tree", "padded", "adamw", "L3", "L4", "B1", "idle", "critic", "lora"])
def test_two_processes_have_the_gradient_and_the_updates_of_one(
    found: tuple[dict[str, Found], Path], alone: dict[str, Found], case: str
) -> None:
    if case not in CASES:
        pytest.skip("needs peft")
    ours, one = found[0][case], alone[case]
    assert distance(ours.gradient, one.gradient) < 1e-5
    assert distance(ours.updates, one.updates) < (1e-3 if case == "adamw" else 1e-4)
    np.testing.assert_allclose(ours.logprobs, one.logprobs, atol=1e-5)
    for here, there in zip(ours.metrics, one.metrics, strict=True):
        for name in ("loss", "tokens", "rows", "grad_norm", "lr", "skipped"):
            assert here[name] == pytest.approx(there[name], rel=1e-4, abs=1e-6), name


def test_L5_no_rank_steps_on_a_batch_of_no_mask(found: tuple[dict[str, Found], Path]) -> None:
    (metrics,) = found[0]["nothing"].metrics
    assert metrics["skipped"] == 1
    assert all(not update.any() for update in found[0]["nothing"].updates.values())


def test_shards_compute_in_bfloat16_as_a_whole_model_does(
    found: tuple[dict[str, Found], Path], alone: dict[str, Found]
) -> None:
    ours, one = found[0]["bfloat16"], alone["bfloat16"]
    assert {tensor.dtype for tensor in ours.weights.values()} == {torch.bfloat16}
    flat, reference = (
        torch.cat([f.gradient[n].float().flatten() for n in one.gradient]) for f in (ours, one)
    )
    assert torch.cosine_similarity(flat, reference, dim=0) > 0.9995
    assert ours.metrics[0]["grad_norm"] == pytest.approx(one.metrics[0]["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("case", ["tree", "bfloat16", "critic"])
def test_a_saved_model_has_the_weights_bit_for_bit(found: tuple[dict[str, Found], Path], case: str) -> None:
    saved = found[1] / f"saved-{case}"
    assert digest(load_file(saved / "model.safetensors")) == digest(found[0][case].weights)
    config = json.loads((saved / "config.json").read_text())
    assert config["dtype"] == ("bfloat16" if case == "bfloat16" else "float32")
    assert (saved / "tokenizer.json").is_file()


def test_a_frozen_learner_of_two_processes_scores(
    found: tuple[dict[str, Found], Path], alone: dict[str, Found]
) -> None:
    np.testing.assert_allclose(found[0]["frozen"].logprobs, alone["frozen"].logprobs, atol=1e-5)


def test_a_killed_rank_ends_the_others_by_name(found: tuple[dict[str, Found], Path]) -> None:
    said = (found[1] / "end-0.txt").read_text()
    assert re.fullmatch(
        r"WorkerDied after (\d\.\d) s: error\[FG903\] rank 0 of a learner's 2 ranks waited for a batch: "
        r"rank 1 \(process \d+\) has died\n  help: look at that rank's log",
        said,
    )
    assert not (found[1] / "end-1.txt").exists()


def test_ranks_are_checked_before_they_meet(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank must be 0 to 1, not 2"):
        Ranks(2, 2, store=str(tmp_path / "store"))
    with pytest.raises(ValueError, match="meet in a file, and '/nowhere/store' lies in no directory"):
        Ranks(0, 2, store="/nowhere/store")
    with pytest.raises(RuntimeError, match=r"open\(\) comes first"):
        _ = Ranks(0, 2, store=str(tmp_path / "store")).mesh
    assert ALONE.sum({"a": 1.5}) == {"a": 1.5}
    assert ALONE.most(3) == 3


REAL: dict[str, dict[str, Any]] = {
    # At a rate of 0.1 its gradient grows threefold in these steps, and with it any difference of rounding.
    "sgd": {"rows": "real", "steps": 3, "max_tokens": 96, **SGD, "lr": 0.01},
    "adamw": {"rows": "real", "steps": 3, "max_tokens": 96, "lr": 1e-5},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_smollm2_as_one_does(smollm2: str, tmp_path: Path, record_property: Any) -> None:
    ours = start(tmp_path / "ranks", model=smollm2, cases=REAL, deadline=120, timeout=850)
    for name, case in REAL.items():
        one = run(smollm2, case, ALONE)
        figures = distance(ours[name].gradient, one.gradient), distance(ours[name].updates, one.updates)
        record_property(name, figures)
        print(f"{name}: gradients differ by {figures[0]:.1e}, updates after 3 steps by {figures[1]:.1e}")
        assert figures[0] < 1e-5
        assert figures[1] < (1e-4 if name == "sgd" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "waited", "says"),
    [
        ("hang", 5, "DeadlineError.*FG904.*waited for a batch: rank 1 did not come within 5 s"),
        ("raise", 5, "WorkerDied.*FG903.*rank 1 failed with ValueError: no such advantage"),
    ],
)
def test_a_rank_that_hangs_or_fails_ends_the_others_by_name(
    tiny: Path, tmp_path: Path, how: str, waited: float, says: str
) -> None:
    start(tmp_path / "ranks", model=str(tiny), cases={}, end=how, deadline=waited)
    said = (tmp_path / "ranks" / "end-0.txt").read_text()
    assert re.search(says, said, re.DOTALL), said
    after = re.search(r"after ([\d.]+) s", said)
    assert after is not None
    assert float(after[1]) < waited + 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen", "glm"])
def test_experts_are_shared_out_like_any_parameter(tmp_path: Path, kind: str) -> None:
    """Also those of a layer to which a rank's tokens send nothing, and where a rank has nothing to train on."""
    model = str(save_experts(tmp_path / "model", kind))
    cases = {rows: {"rows": rows, "steps": 3, "checkpoint": rows == "B4", **SGD} for rows in ("B4", "L4")}
    ours = start(tmp_path / "ranks", model=model, cases=cases)
    for name, case in cases.items():
        one = run(model, case, ALONE)
        assert distance(ours[name].gradient, one.gradient) < 1e-5
        assert distance(ours[name].updates, one.updates) < 1e-4
