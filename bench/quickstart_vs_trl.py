"""The same GRPO job on flowgraph and on TRL's GRPOTrainer, one after the other, in one go.

`python bench/quickstart_vs_trl.py [--steps 8] [--rounds 3]` needs `pip install trl`. Same model directory, prompts,
samples (4 × 4), lengths (32 new tokens; plain-text prompts that a model seldom ends early), dtype (bfloat16), reward
function and optimiser rate. Rounds alternate, so that what else the machine does falls on all; figures are medians
of rounds, over all steps but the first.

flowgraph runs the job with `max_lag 0`, synchronous as TRL is, and with `max_lag 1`, where the next batch is sampled
while this one is trained on, so that rows are one version old. Both jobs run once more with a learner that computes in
float32, which a processor may do faster than in bfloat16 (one of Intel without AMX does): flowgraph's engine gets its
weights in bfloat16 as before, and TRL has one model. Peak memory is the sum of the resident memory of all
processes of a run, shared pages once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, TOKENS = 4, 4, 32


def reward(completions: list[str], **columns: Any) -> list[float]:
    """TRL's signature, read by both: the share of digits, which differs between samples."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def write_prompts(path: Path, steps: int) -> None:
    """Plain-text sums of reasoning-gym, the same for both."""
    import reasoning_gym

    data = reasoning_gym.create_dataset("chain_sum", size=PROMPTS * steps, seed=7, min_digits=1, max_digits=1)
    with path.open("w") as out:
        for entry in data:
            text = f"{entry['question']}\nA long explanation, word by word:"
            out.write(json.dumps({"prompt": text, "answer": entry["answer"]}) + "\n")


class PeakMemory(threading.Thread):
    """Largest sum of PSS over a process and its descendants, sampled every half second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.done = pid, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.peak = max(self.peak, sum(pss(p) for p in family(self.pid)))


def family(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


def pss(pid: int) -> int:
    try:
        lines = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def run_flowgraph(work: Path, steps: int, max_lag: int, learner: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "flowgraph.cli", "run", str(ROOT / "bench/vs_trl.yaml"), "--plain"]
    command += ["--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"hops.dispatch.in.version.max_lag": max_lag}
    options |= {f"owners.trainer.learner.{name}": value for name, value in learner.items()}
    process = subprocess.Popen(
        [
            *command,
            "--runs",
            "runs",
            *(part for pair in options.items() for part in ("--set", "{}={}".format(*pair))),
        ],
        cwd=work,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    memory = PeakMemory(process.pid)
    memory.start()
    assert process.wait() == 0, "flowgraph failed; see its output above"
    memory.done.set()
    directory = max((work / "runs/vs_trl").iterdir())
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][1:]
    return summarise([r["step_seconds"] for r in records], [r["train.tokens"] for r in records], memory.peak)


def run_trl(work: Path, steps: int, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--only-trl", str(steps), "--dtype", dtype]
    # Its threads wait as OpenMP's do by default, which is fastest for one process alone.
    process = subprocess.Popen(
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    memory = PeakMemory(process.pid)
    memory.start()
    output, _ = process.communicate()
    memory.done.set()
    assert process.returncode == 0, f"TRL failed: {output[-2000:]}"
    seconds, tokens = json.loads(output.strip().splitlines()[-1])
    return summarise(seconds[1:], tokens[1:], memory.peak)


def summarise(seconds: list[float], tokens: list[float], peak: int) -> dict[str, float]:
    return {
        "s/step": statistics.median(seconds),
        "tokens/s": sum(tokens) / sum(seconds),
        "peak GB": peak / 1e9,
    }


def trl(steps: int, dtype: str) -> None:
    """TRL's own trainer; prints seconds and generated tokens of every step as its last line."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from flowgraph.models import ensure

    torch.manual_seed(0)
    path = ensure("smollm2-135m", progress=False).path
    rows = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    seconds: list[float] = []
    tokens: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.monotonic() - self.began)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
        ) -> None:
            if logs and "completions/mean_length" in logs:
                tokens.append(logs["completions/mean_length"] * PROMPTS * SAMPLES)

    config = GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        max_steps=steps,
        learning_rate=1e-6,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        disable_tqdm=True,
        temperature=1.0,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps([seconds, tokens]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-trl", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_trl:
        trl(options.only_trl, options.dtype)
        return
    wide = {"dtype": "float32", "weights_dtype": "bfloat16"}
    jobs: dict[str, Callable[[Path, int], dict[str, float]]] = {
        "flowgraph, max_lag 0": lambda work, steps: run_flowgraph(work, steps, 0, {}),
        "flowgraph, max_lag 1": lambda work, steps: run_flowgraph(work, steps, 1, {}),
        "TRL": lambda work, steps: run_trl(work, steps, "bfloat16"),
        "max_lag 0, float32": lambda work, steps: run_flowgraph(work, steps, 0, wide),
        "max_lag 1, float32": lambda work, steps: run_flowgraph(work, steps, 1, wide),
        "TRL, float32": lambda work, steps: run_trl(work, steps, "float32"),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_prompts(work / "prompts.jsonl", options.steps)
        for _ in range(options.rounds):
            for job, run in jobs.items():
                results[job].append(run(work, options.steps))
                print(job, {k: round(v, 2) for k, v in results[job][-1].items()}, flush=True)
    medians = {k: {m: statistics.median(one[m] for one in v) for m in v[0]} for k, v in results.items()}
    job = f"{PROMPTS} prompts x {SAMPLES} samples, <= {TOKENS} new tokens, SmolLM2-135M, bfloat16"
    print(f"\n{job}, medians of {options.rounds} rounds; x: how many times better than TRL\n")
    print(f"{'':22} {'s/step':>7} {'x':>5} {'tokens/s':>9} {'x':>5} {'peak GB':>8} {'x':>5}")
    theirs = medians["TRL"]
    for name, row in medians.items():
        times = (
            theirs["s/step"] / row["s/step"],
            row["tokens/s"] / theirs["tokens/s"],
            theirs["peak GB"] / row["peak GB"],
        )
        print(
            f"{name:22} {row['s/step']:>7.2f} {times[0]:>5.2f} {row['tokens/s']:>9.1f} {times[1]:>5.2f} "
            f"{row['peak GB']:>8.2f} {times[2]:>5.2f}"
        )


if __name__ == "__main__":
    main()
