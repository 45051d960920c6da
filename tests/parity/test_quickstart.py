"""The quickstart as a user runs it: it learns, its model loads elsewhere, and Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.test_signals import await_end, default_sigint

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "flowgraph.cli", "run", "graphs/quickstart.yaml", "--plain"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_learns_and_its_model_loads_in_transformers(smollm2: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--runs", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (tmp_path / "quickstart").iterdir()
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [r for r in records if "eval.score" in r]
    assert after["eval.version"] == 30
    gain = after["eval.score"] - before["eval.score"]
    assert gain > 2 * math.hypot(before["eval.stderr"], after["eval.stderr"])
    ledger = json.loads((directory / "summary.json").read_text())["ledger"]
    assert ledger == {"dispatched": 1920, "in_flight": 0, "ready": 0, "consumed": 1920, "dropped": {}}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    prompt = tokenizer("4 + 3 = 7\n2 + 5 = 7\n9 - 1 = 8\n6 - 4 = 2\n3 + 2 =", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    text = tokenizer.decode(out[0][prompt["input_ids"].shape[1] :])
    assert text.strip()[0] == "5"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 6.0, 12.0, 25.0])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ending_a_run_with_real_workers_leaves_nothing(
    smollm2: str, tmp_path: Path, seconds: float, how: signal.Signals
) -> None:
    before = set(os.listdir("/dev/shm"))
    command = [*COMMAND, "--runs", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=default_sigint)
    time.sleep(seconds)
    os.killpg(process.pid, how) if how is signal.SIGINT else process.kill()
    process.wait(30)
    await_end(process.pid)
    assert set(os.listdir("/dev/shm")) <= before
