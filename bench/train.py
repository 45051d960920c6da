"""A training step on the samples of a few prompts: a padded loop as TRL trains, packed rows, and each token once.

    python bench/train.py [--rounds 5] [--dtype bfloat16|float32] [--shapes 96:24,64:64,24:96] [--groups 2]

Every prompt has 8 samples. All ways train the same rows of the same model by the same loss. They take turns, in a fresh
process each time, so that peak memory is a way's own: one step to warm up and some that count; figures are medians of
all that count. Tokens are those of the rows, whatever a way makes of them, so speeds compare as times do. On a machine
that others use too, `--cpu --threads 1` compares the processor time that each way needs, without that of waiting.

`plain` is what a trainer does with transformers alone, and what TRL's GRPOTrainer does (less the entropies that it
computes besides, as the learner does): all rows padded, logits of the responses, log-softmax, loss.backward(), clip,
torch's AdamW in the model's dtype. The learner's keeps float32 masters.

`limit` is how many times fewer tokens a tree lays than the padded rows have: the most that can be gained where every
token costs the same and nothing else does. (Something does, with every way alike: the head, for each token of a
response, and the update.) Gradients are compared with those of plain, in float32 and before the first step:
|difference| / |plain|.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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


def child(args: argparse.Namespace) -> None:
    """Print a line of JSON for each step that counts, or write the gradient of the first to a file and nothing else."""
    import torch

    from flowgraph.models import ensure

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu else time.perf_counter
    path = ensure("smollm2-135m", progress=False).path
    one = Plain(path, args.dtype) if args.child == "plain" else Ours(path, args.dtype, args.child)
    prompt, response = sizes(args.shapes)
    given = batch(prompt, response, args.groups)
    if args.gradient:
        one.gradients(**given, prompt=prompt)
        np.save(args.gradient, one.flat())
        return
    for step in range(1 + args.steps):
        began = clock()
        one.gradients(**given, prompt=prompt)
        half = clock()
        one.update()
        took = {"gradients": half - began, "all": clock() - began}
        if step:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({**took, "peak": peak}), flush=True)


def run(way: str, options: Sequence[str]) -> list[dict[str, float]]:
    """What a child says of its steps."""
    command = [sys.executable, __file__, "--child", way, *options]
    print(f"running {way} {' '.join(options)}", file=sys.stderr, flush=True)
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        why = ", which is how a machine that has no memory left ends it" if ran.returncode == -9 else ""
        raise RuntimeError(f"{way} ended with status {ran.returncode}{why}\n{ran.stderr[-4000:]}")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def sizes(shape: str) -> tuple[int, int]:
    """ "96:24" → 96, 24."""
    prompt, response = map(int, shape.split(":"))
    return prompt, response


def fewer(prompt: int, response: int) -> float:
    """How many times fewer tokens a tree has than padded rows."""
    return SAMPLES * (prompt + response) / (prompt + SAMPLES * response)


def compare(ways: Sequence[str], options: list[str]) -> dict[str, float]:
    """How far each way's gradient is from that of the first, in float32."""
    found: dict[str, float] = {}
    first = None
    with tempfile.TemporaryDirectory() as directory:
        file = str(Path(directory) / "gradient.npy")
        for way in ways:
            run(way, [*options, "--dtype", "float32", "--gradient", file])
            gradient = np.load(file)
            first = gradient if first is None else first
            found[way] = float(np.linalg.norm(gradient - first) / np.linalg.norm(first))
    return found


def measure(ways: Sequence[str], rounds: int, options: list[str]) -> dict[str, dict[str, float]]:
    """Medians of seconds (`gradients`: forward and backward; `all`: and the update) and of peak bytes, by way."""
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seen[way] += run(way, options)
    return {
        way: {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        for way, steps in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=3, help="of each round that count, after one that does not"
    )
    parser.add_argument("--groups", type=int, default=2, help="prompts of a batch, each with 8 samples")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shapes", default="96:24,64:64,24:96", help="prompt:response in tokens, ...")
    parser.add_argument("--ways", default=",".join(WAYS), help="the first is what others are compared with")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--cpu", action="store_true", help="compare processor time instead of time")
    parser.add_argument("--no-gradients", action="store_true", help="do not compare gradients")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--gradient", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    ways = args.ways.split(",")
    print(
        f"smollm2-135m, {args.dtype}, {args.groups} prompts x {SAMPLES} samples; medians of {args.rounds} rounds of"
        f" {args.steps} steps{', processor time' if args.cpu else ''}\n"
        f"x: times as fast as {ways[0]}, whole step / forward and backward; share: of the limit\n\n"
        f"{'prompt:response':16}{'':7} {'tokens/s':>9} {'x':>12} {'limit':>6} {'share':>12} {'peak GB':>8}"
        f" {'gradient':>9}"
    )
    for shape in args.shapes.split(","):
        prompt, response = sizes(shape)
        options = ["--shapes", shape, "--groups", str(args.groups), "--steps", str(args.steps)]
        options += ["--threads", str(args.threads)] if args.threads else []
        options += ["--cpu"] if args.cpu else []
        off = {} if args.no_gradients else compare(ways, options)
        found = measure(ways, args.rounds, [*options, "--dtype", args.dtype])
        tokens, first = args.groups * SAMPLES * (prompt + response), found[ways[0]]
        for way, one in found.items():
            limit = fewer(prompt, response) if way == "tree" else 1.0
            x = first["all"] / one["all"], first["gradients"] / one["gradients"]
            print(
                f"{shape if way == ways[0] else '':16}{way:7} {tokens / one['all']:>9.0f} "
                f"{x[0]:>5.2f} /{x[1]:>5.2f} {limit:>6.2f} {x[0] / limit:>5.2f} /{x[1] / limit:>5.2f} "
                f"{one['peak'] / 1e9:>8.2f} {f'{off[way]:.1e}' if off else '':>9}",
                flush=True,
            )


if __name__ == "__main__":
    main()
