"""A training step on the samples of a few prompts: a padded loop as TRL trains, packed rows, and each token once.

    python bench/train.py [--rounds 5] [--dtype bfloat16|float32] [--shapes 96:24,64:64,24:96] [--groups 2]

Every prompt has 8 samples. All ways train the same rows of the same model by the same loss, each in a process of its own
so that its peak memory is its own; rounds alternate between them, and figures are medians. Tokens are those of the
rows, whatever a way makes of them, so speeds compare as times do. `plain` is what a trainer does with transformers alone, and what TRL's
GRPOTrainer does: all rows padded, logits of the responses, log-softmax, loss.backward(), clip, torch's AdamW.

`limit` is how many times fewer tokens a tree lays than the padded rows have: the most that can be gained where every
token costs the same. Gradients are compared with those of plain, before the first step: |difference| / |plain|.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SAMPLES = 8
WAYS = ("plain", "padded", "packed", "tree")


def batch(prompt: int, response: int, groups: int, seed: int = 0) -> dict[str, Any]:
    """Rows of random tokens: [rows, prompt + response], the prompt alike in the rows of a group; advantages by row."""
    random = np.random.default_rng(seed)
    rows = groups * SAMPLES
    tokens = random.integers(100, 40_000, (rows, prompt + response)).astype(np.int32)
    tokens[:, :prompt] = np.repeat(tokens[::SAMPLES, :prompt], SAMPLES, axis=0)
    return {"tokens": tokens, "advantages": random.standard_normal(rows).astype(np.float32)}


class Plain:
    """transformers and torch alone."""

    def __init__(self, path: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, betas=(0.9, 0.95))

    def gradients(self, tokens: Any, advantages: Any, prompt: int) -> None:
        import torch

        ids_BL = torch.from_numpy(tokens.astype(np.int64))
        response = ids_BL.shape[1] - prompt
        logits_BRV = self.model(
            ids_BL, attention_mask=torch.ones_like(ids_BL), use_cache=False, logits_to_keep=response + 1
        ).logits[:, :-1]
        logprob_BR = selected(logits_BRV, ids_BL[:, prompt:])
        ratio_BR = torch.exp(logprob_BR - logprob_BR.detach())
        advantage_B1 = torch.from_numpy(advantages)[:, None]
        clipped_BR = ratio_BR.clamp(0.8, 1.2)
        (-torch.minimum(ratio_BR * advantage_B1, clipped_BR * advantage_B1)).mean().backward()

    def update(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def flat(self) -> Any:
        return flat_gradient(self.model, 1.0)


def selected(logits_BRV: Any, ids_BR: Any) -> Any:
    """Log-probabilities of the ids, as TRL's selective_log_softmax: in bfloat16 row by row, which needs less memory."""
    import torch

    if logits_BRV.dtype in (torch.float32, torch.float64):
        chosen_BR = logits_BRV.gather(-1, ids_BR[..., None])[..., 0]
        return chosen_BR - torch.stack([torch.logsumexp(row, -1) for row in logits_BRV])
    rows = [
        torch.log_softmax(row, -1).gather(-1, ids[:, None])[:, 0]
        for row, ids in zip(logits_BRV, ids_BR, strict=True)
    ]
    return torch.stack(rows)


class Ours:
    """The learner, as a ring has it."""

    def __init__(self, path: str, dtype: str, pack: str) -> None:
        from flowgraph.learners.torch import TorchLearner
        from hops.loss import policy_gradient

        self.learner = TorchLearner(path, lr=1e-6, dtype=dtype, pack=pack, max_tokens=8192)
        self.loss = policy_gradient()
        self.tokens = 0

    def rows(self, tokens: Any, advantages: Any, prompt: int) -> Any:
        from flowgraph.learners.protocol import Rows

        rows, length = tokens.shape
        mask = np.tile(np.arange(length) >= prompt, rows)
        fields = {"advantages": np.repeat(advantages, length)}
        return Rows(tokens.reshape(-1), np.arange(0, rows * length + 1, length), mask, fields)

    def gradients(self, tokens: Any, advantages: Any, prompt: int) -> None:
        rows = self.rows(tokens, advantages, prompt)
        self.learner.accumulate(rows, self.loss)
        self.tokens = int(rows.mask.sum())

    def update(self) -> None:
        self.learner._optimizer.step(self.tokens)

    def flat(self) -> Any:
        found = flat_gradient(self.learner._model, self.tokens)
        self.learner._optimizer.drop()
        return found


def flat_gradient(model: Any, divisor: float) -> Any:
    import torch

    named = sorted(model.named_parameters())
    return torch.cat([p.grad.float().reshape(-1) / divisor for _, p in named if p.grad is not None]).numpy()


def child(way: str, dtype: str) -> None:
    """Serve the parent: a line of JSON in, a line out. One that says "gradient" asks for a file of it."""
    from flowgraph.models import ensure

    path = ensure("smollm2-135m", progress=False).path
    one = Plain(path, dtype) if way == "plain" else Ours(path, dtype, way)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = asked["prompt"]
        given = batch(prompt, asked["response"], asked["groups"])
        began = time.perf_counter()
        one.gradients(**given, prompt=prompt)
        half = time.perf_counter()
        if "gradient" in asked:
            np.save(asked["gradient"], one.flat())
            if isinstance(one, Plain):
                one.model.zero_grad()
        else:
            one.update()
        took = {"gradients": half - began, "all": time.perf_counter() - began}
        print(json.dumps({**took, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


class Child:
    def __init__(self, way: str, dtype: str) -> None:
        command = [sys.executable, __file__, "--child", way, "--dtype", dtype]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        if self.process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{' '.join(command)} failed")

    def ask(self, **what: Any) -> dict[str, float]:
        assert self.process.stdout is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def positions(prompt: int, response: int) -> float:
    """How many times fewer tokens a tree has than padded rows."""
    return SAMPLES * (prompt + response) / (prompt + SAMPLES * response)


def compare(shape: dict[str, int], directory: Path) -> dict[str, float]:
    """How far each way's gradient is from that of plain, in float32."""
    found = {}
    plain = None
    for way in WAYS:
        one = Child(way, "float32")
        file = directory / f"{way}.npy"
        one.ask(**shape, gradient=str(file))
        one.close()
        gradient = np.load(file)
        plain = gradient if plain is None else plain
        found[way] = float(np.linalg.norm(gradient - plain) / np.linalg.norm(plain))
        file.unlink()
    return found


def measure(shape: dict[str, int], dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    children = {way: Child(way, dtype) for way in WAYS}
    try:
        for one in children.values():
            one.ask(**shape)
        seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, one in children.items():
                seen[way].append(one.ask(**shape))
    finally:
        for one in children.values():
            one.close()
    return {way: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for way, runs in seen.items()}


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shapes", default="96:24,64:64,24:96")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.dtype)
        return
    shapes = [tuple(map(int, shape.split(":"))) for shape in args.shapes.split(",")]
    print(f"smollm2-135m, {args.dtype}, {args.groups} prompts x {SAMPLES} samples; medians of {args.rounds} rounds")
    print("x: times as fast as plain, whole step / forward and backward; share: of the limit\n")
    print(f"{'prompt:response':16}{'':8} {'tokens/s':>9} {'x':>12} {'limit':>6} {'share':>12} {'peak GB':>8} {'gradient':>9}")
    for prompt, response in shapes:
        shape = {"prompt": prompt, "response": response, "groups": args.groups}
        with tempfile.TemporaryDirectory() as name:
            off = compare(shape, Path(name))
        found = measure(shape, args.dtype, args.rounds)
        tokens, plain = args.groups * SAMPLES * (prompt + response), found["plain"]
        for way, one in found.items():
            limit = positions(prompt, response) if way == "tree" else 1.0
            x = plain["all"] / one["all"], plain["gradients"] / one["gradients"]
            print(
                f"{f'{prompt}:{response}' if way == 'plain' else '':16}{way:8} {tokens / one['all']:>9.0f} "
                f"{x[0]:>5.2f} /{x[1]:>5.2f} {limit:>6.2f} {x[0] / limit:>5.2f} /{x[1] / limit:>5.2f} "
                f"{one['peak'] / 1e9:>8.2f} {off[way]:>9.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
