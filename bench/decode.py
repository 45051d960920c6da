"""A decode step of the engine beside `transformers.generate` and what both can't go below, on equal requests.

`python bench/decode.py [--slots 32,64] [--prompt 32] [--tokens 32] [--rounds 3] [--threads N] [--cpu]`

All prompts have one length, all answers another, and nothing ends early, which suits `generate` best: no row is padding
and none ends before the others. A step is one token of every request, sampled; its time is that of a whole answer less
that of an answer of one token (the prompts), a token. Everybody runs in this process on the same threads; rounds
alternate, and figures are medians of rounds after one that warms up.

mixed: budgets from 1/8 of --tokens to all of it; tokens/s of the whole job, prompts included, counts what was asked
for. `generate` runs all rows until the longest budget ends; the engine's steps shrink.

products: the linear layers alone, on as many rows, as the model of transformers has them; reading: one pass over their
weights, which every step must make.

--cpu: seconds that the process computed, not those that passed: for one thread on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flowgraph.runtime.executors import environment

CLOCK = time.process_time if "--cpu" in sys.argv else time.perf_counter
os.environ.update(environment())  # before torch is imported, as the runtime does for its workers


def answers(engine: Any, prompts: Any, budgets: list[int], turn: int) -> float:
    """Seconds for the engine to answer all prompts."""
    from flowgraph import Sampling

    async def all_of_them() -> None:
        asked = (
            engine.generate(prompt, Sampling(budget), key=turn * len(prompts) + at, rid=f"{turn}.{at}")
            for at, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
        )
        await asyncio.gather(*asked)

    engine._prefixes.clear()  # a round before had the same prompts
    began = CLOCK()
    asyncio.run(all_of_them())
    return CLOCK() - began


def generated(model: Any, prompts: Any, tokens: int) -> float:
    """Seconds for `transformers.generate` to do so."""
    import torch

    ids = torch.from_numpy(prompts).long()
    began = CLOCK()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    return CLOCK() - began


def products(model: Any, slots: int) -> float:
    """Seconds for all linear layers of the model on `slots` rows."""
    import torch

    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    inputs = {layer.in_features: torch.randn(slots, layer.in_features).to(model.dtype) for layer in layers}
    began = CLOCK()
    with torch.inference_mode():
        for layer in layers:
            layer(inputs[layer.in_features])
    return CLOCK() - began


def reading(model: Any) -> float:
    """Seconds to read the weights of all linear layers."""
    import torch

    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    began = CLOCK()
    for layer in layers:
        layer.weight.data.view(torch.int64).sum()
    return CLOCK() - began


def measure(slots: int, given: argparse.Namespace) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from flowgraph.engines.transformers import TransformersEngine
    from flowgraph.models import ensure

    path = ensure("smollm2-135m", progress=False).path
    engine: Any = TransformersEngine(
        path, slots=slots, context=given.prompt + given.tokens, dtype=given.dtype, threads=given.threads
    )
    engine._model.eos_ids = frozenset()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, given.dtype)).eval()
    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 20000, (slots, given.prompt)).astype(np.int32)
    mixed = rng.integers(given.tokens // 8, given.tokens + 1, slots).tolist()
    mixed[0] = given.tokens
    even, one = [given.tokens] * slots, [1] * slots
    turns = iter(range(1 << 20))
    jobs: dict[str, Callable[[], float]] = {
        "ours": lambda: (
            (answers(engine, prompts, even, next(turns)) - answers(engine, prompts, one, next(turns)))
            / (given.tokens - 1)
        ),
        "generate": lambda: (
            (generated(model, prompts, given.tokens) - generated(model, prompts, 1)) / (given.tokens - 1)
        ),
        "ours, mixed": lambda: answers(engine, prompts, mixed, next(turns)) / sum(mixed),
        "generate, mixed": lambda: generated(model, prompts, given.tokens) / sum(mixed),
        "products": lambda: statistics.median(products(model, slots) for _ in range(5)),
        "reading": lambda: statistics.median(reading(model) for _ in range(5)),
    }
    seen: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(given.rounds + 1):
        for name, job in jobs.items():
            seconds = job()
            if turn:
                seen[name].append(seconds)
    engine.close()
    return {name: statistics.median(values) for name, values in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--slots", default="32,64")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    rows = {slots: measure(slots, given) for slots in map(int, given.slots.split(","))}
    print(
        f"smollm2-135m, {given.dtype}, {given.threads} threads, prompts of {given.prompt} and answers of "
        f"{given.tokens} tokens, medians of {given.rounds} rounds{', CPU time' if given.cpu else ''}\n"
    )
    print(f"{'ms a step':>10}{'ours':>8}{'generate':>10}{'x':>6}{'products':>10}{'reading':>9}", end="")
    print(f"{'tokens/s, mixed:':>20}{'ours':>7}{'generate':>10}{'x':>6}")
    for slots, row in rows.items():
        ms = {name: 1e3 * seconds for name, seconds in row.items()}
        print(
            f"{slots:>4} slots{ms['ours']:>8.1f}{ms['generate']:>10.1f}{ms['generate'] / ms['ours']:>6.2f}",
            end="",
        )
        print(f"{ms['products']:>10.1f}{ms['reading']:>9.1f}{1 / row['ours, mixed']:>27.0f}", end="")
        print(f"{1 / row['generate, mixed']:>10.0f}{row['generate, mixed'] / row['ours, mixed']:>6.2f}")


if __name__ == "__main__":
    main()
