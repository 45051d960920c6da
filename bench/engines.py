"""Every engine and plain `transformers.generate` on one job: 64 requests of mixed lengths, all sent at once.

`python bench/engines.py [--rounds 3] [--python PATH] [--dtype bfloat16]`; without an interpreter that has SGLang (or
FLOWGRAPH_SGLANG_PYTHON) its row is left out. Prompts have 8 to 128 tokens, budgets are 8 to 64 (seed 0), and everybody
may use all cores. Engines run one after the other, each in a process of its own; a round is the whole job, and figures
are medians of rounds after one that warms up.

tokens/s counts the tokens that were asked for: `generate` pads its batches on the left and runs each until its longest
budget, and what it samples beyond a request's own budget is nobody's. It gets the requests in batches of 16, sorted by
budget, which suits it. first: seconds until the first whole response is there. sync: all five actions, of the same
weights again, and the bytes that went into replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

MODEL, REQUESTS, BATCH = "smollm2-135m", 64, 16
ROWS = {
    "transformers": {"use": "transformers"},
    "transformers, 1 server": {"use": "transformers", "processes": 1},
    "transformers, 2 servers": {"use": "transformers", "processes": 2},
    "sglang": {"use": "sglang", "device": "cpu"},
}


def job(vocabulary: int) -> list[tuple[np.ndarray[Any, Any], int]]:
    """Prompt ids and budget of each request; ids of plain words, so that no prompt ends a response."""
    rng = np.random.default_rng(0)
    lengths, budgets = rng.integers(8, 129, REQUESTS), rng.integers(8, 65, REQUESTS)
    return [
        (rng.integers(1000, vocabulary // 2, n).astype(np.int32), int(b))
        for n, b in zip(lengths, budgets, strict=True)
    ]


async def serve(options: Any, model_dir: str, rounds: int) -> dict[str, float]:
    """One engine: start it, do the job, and sync it."""
    from safetensors.torch import load_file

    from flowgraph import Sampling
    from flowgraph.engines.registry import start_engine
    from flowgraph.models import facts

    known = facts(MODEL)
    assert known is not None
    requests = job(known.vocab)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as logs:
        engine = await start_engine(
            options,
            model_dir,
            context=192,
            threads=len(os.sched_getaffinity(0)),
            logs=logs,
            journal=lambda entry: None,
            patience=600,
        )
        start = time.monotonic() - began
        seen: dict[str, list[float]] = {"tokens/s": [], "first": [], "sync": [], "bytes": []}
        try:
            for turn in range(rounds + 1):
                began, ends, count = time.monotonic(), [], 0

                async def one(at: int, turn: int = turn) -> int:
                    prompt, budget = requests[at]
                    out = await engine.generate(prompt, Sampling(budget), key=at + turn, rid=uuid.uuid4().hex)
                    ends.append(time.monotonic())  # noqa: B023
                    return len(out.ids)

                count = sum(await asyncio.gather(*map(one, range(REQUESTS))))
                if turn:
                    seen["tokens/s"].append(count / (time.monotonic() - began))
                    seen["first"].append(min(ends) - began)
            weights = {
                name: tensor.to(_dtype(options.dtype))
                for file in Path(model_dir).glob("*.safetensors")
                for name, tensor in load_file(file).items()
            }
            for version in range(1, rounds + 2):
                done = await engine.sync(weights, version)
                if version > 1:
                    seen["sync"].append(done.seconds)
                    seen["bytes"].append(float(done.pushed))
        finally:
            await engine.close()
    return {"start": start, **{name: statistics.median(values) for name, values in seen.items()}}


def plain(model_dir: str, dtype: str, rounds: int) -> dict[str, float]:
    """`transformers.generate` on the same requests."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    began = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=_dtype(dtype)).eval()
    start = time.monotonic() - began
    requests = sorted(job(model.config.vocab_size), key=lambda r: r[1])
    rates, firsts = [], []
    for turn in range(rounds + 1):
        began, first, count = time.monotonic(), 0.0, 0
        for at in range(0, REQUESTS, BATCH):
            batch = requests[at : at + BATCH]
            width = max(len(p) for p, _ in batch)
            ids = torch.tensor([[0] * (width - len(p)) + p.tolist() for p, _ in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                max_new_tokens=max(b for _, b in batch),
                pad_token_id=0,
                eos_token_id=None,
            )
            count += sum(min(b, out.shape[1] - width) for _, b in batch)
            first = first or time.monotonic() - began
        if turn:
            rates.append(count / (time.monotonic() - began))
            firsts.append(first)
    return {"start": start, "tokens/s": statistics.median(rates), "first": statistics.median(firsts)}


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def child(row: str, dtype: str, rounds: int, python: str) -> None:
    """Measure one row in this process, and print it as JSON."""
    from flowgraph.models import ensure

    model_dir = ensure(MODEL).path
    if row == "generate":
        found = plain(model_dir, dtype, rounds)
    else:
        import msgspec

        from flowgraph.engines.registry import EngineOptions

        extra = {"python": python, "slots": REQUESTS} if row == "sglang" else {"slots": REQUESTS}
        given = {**ROWS[row], "model": MODEL, "dtype": dtype, **extra}
        options = msgspec.convert(given, EngineOptions)
        found = asyncio.run(serve(options, model_dir, rounds))
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--python", default=os.environ.get("FLOWGRAPH_SGLANG_PYTHON", ""))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        child(given.row, given.dtype, given.rounds, given.python)
        return
    rows = [row for row in ROWS if row != "sglang" or given.python] + ["generate"]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        command = [sys.executable, __file__, "--row", row, "--rounds", str(given.rounds)]
        command += ["--dtype", given.dtype, "--python", given.python]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if ran.returncode:
            raise SystemExit(f"{row} failed:\n{ran.stderr[-3000:]}")
        found[row] = json.loads(ran.stdout.splitlines()[-1])
        print(f"{row}: {found[row]}", file=sys.stderr)
    base = found["generate"]["tokens/s"]
    tokens = sum(budget for _, budget in job(49152))
    print(
        f"{REQUESTS} requests, {tokens} new tokens, {MODEL}, {given.dtype}, medians of {given.rounds} rounds"
    )
    print("x: how many times the tokens/s of transformers.generate\n")
    print(f"{'':<24}{'tokens/s':>9}{'x':>6}{'first s':>9}{'start s':>9}{'sync s':>8}{'MB':>7}")
    for row, values in found.items():
        rate = values["tokens/s"]
        line = f"{row:<24}{rate:>9.1f}{rate / base:>6.2f}{values['first']:>9.2f}{values['start']:>9.1f}"
        if "sync" in values:
            line += f"{values['sync']:>8.2f}{values['bytes'] / 1e6:>7.0f}"
        print(line)


if __name__ == "__main__":
    main()
