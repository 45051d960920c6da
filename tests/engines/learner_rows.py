"""Rows for learner tests, and the same gradient twice: ours, and by plain Hugging Face code, row by row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowgraph.learners.protocol import Rows, Tokens
from flowgraph.learners.torch import TorchLearner
from hops.loss import policy_gradient

PACKINGS = ("padded", "packed", "tree")
LOSS = policy_gradient()


def make_rows(tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], seed: int = 0) -> Rows:
    flat = np.concatenate([np.array(row, np.int32) for row in tokens])
    random = np.random.default_rng(seed)
    fields = {
        "advantages": random.standard_normal(len(flat)).astype(np.float32),
        "logprobs": -random.random(len(flat)).astype(np.float32) * 8,
    }
    mask = np.concatenate([np.array(row, np.bool_) for row in masks])
    return Rows(flat, np.cumsum([0, *map(len, tokens)]), mask, fields)


def sampled(groups: int, prompt: int, samples: int, response: int, seed: int = 0) -> Rows:
    """Groups of samples that share a prompt, responses of up to `response` tokens."""
    random = np.random.default_rng(seed)
    tokens, masks = [], []
    for _ in range(groups):
        shared = random.integers(0, 256, prompt).tolist()
        for _ in range(samples):
            length = int(random.integers(1, response + 1))
            tokens.append(shared + random.integers(0, 256, length).tolist())
            masks.append([0] * prompt + [1] * length)
    return make_rows(tokens, masks, seed)


def plain_gradient(model_dir: Path, rows: Rows, loss: Any = LOSS) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradient and log-probabilities (of masked tokens) with nothing of ours but the loss."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    parts = []
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1), logprobs]))
    logprobs = torch.cat(parts)[torch.from_numpy(rows.mask)]
    fields = {name: torch.from_numpy(values[rows.mask]) for name, values in rows.fields.items()}
    value = token_mean(loss, logprobs, fields)
    value.backward()
    return float(value.detach()), {n: p.grad for n, p in model.named_parameters()}, logprobs.detach()


def token_mean(loss: Any, logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """The mean of an element-wise loss that reads no entropy."""
    none = torch.zeros(len(logprobs), dtype=torch.int64)
    mean: Tensor = loss(Tokens(logprobs, torch.zeros_like(logprobs), fields, none, 1)).loss.mean()
    return mean


def our_gradient(learner: TorchLearner, rows: Rows, loss: Any = LOSS) -> tuple[float, dict[str, Tensor]]:
    """The gradient that the optimiser would get, and no step."""
    optimizer, found = learner._optimizer, {}

    def no_step(divisor: float) -> tuple[float, float]:
        names = [name for name, p in learner._model.named_parameters() if p.requires_grad]
        found.update(zip(names, [g.float() / divisor for g in optimizer._gradients()], strict=True))
        optimizer.drop()
        return 0.0, 0.0

    optimizer.step = no_step  # type: ignore[method-assign]
    try:
        return learner.step(rows, loss)["loss"], found
    finally:
        del optimizer.step


def assert_same_gradient(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float) -> None:
    """Relative per tensor; a tensor whose gradient cancels to nothing is measured against the whole model's."""
    assert one.keys() == other.keys()
    whole = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in other.values()]))
    for name in one:
        distance = torch.linalg.vector_norm(one[name] - other[name])
        assert distance <= tolerance * (torch.linalg.vector_norm(other[name]) + 0.1 * whole), name


def digest(weights: Mapping[str, Tensor]) -> str:
    parts = [weights[name].view(torch.uint8).numpy().tobytes() for name in sorted(weights)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def frozen_learners(model_dir: Path) -> dict[str, TorchLearner]:
    """One float32 learner per packing, for tests that take no step."""
    return {
        how: TorchLearner(str(model_dir), lr=1e-3, dtype="float32", pack=how, threads=1) for how in PACKINGS
    }
