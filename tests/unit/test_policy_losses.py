"""hops.loss and the learner's head against the published formulas: padded matrices, plain numpy, float64.

The formulas are those of TRL's GRPOTrainer._compute_loss and verl's core_algos (compute_policy_loss_vanilla, _gspo,
_cispo, kl_penalty, agg_loss), written again here on [sequence, token] matrices; gradients are differences of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flowgraph import Losses, Tokens, token_loss
from flowgraph.learners.aggregate import divisor
from flowgraph.learners.head import Given, Head, Targets
from hops.loss import policy_gradient

LENGTHS = (3, 1, 5, 2)
SEQUENCES, LONGEST, VOCABULARY = len(LENGTHS), max(LENGTHS), 7
LENGTH = 9
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
Matrix = np.ndarray[Any, np.dtype[np.float64]]


class Batch:
    """Random logits, targets and fields; the rollout and the old policy are near enough to clip only some tokens."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        shape = (SEQUENCES, LONGEST)
        self.logits = random.normal(size=(*shape, VOCABULARY)) * 1.5
        self.target = random.integers(0, VOCABULARY, shape)
        self.mask = np.arange(LONGEST) < np.array(LENGTHS)[:, None]
        now = logprobs(self.logits, self.target)
        self.fields = {
            "advantages": random.normal(size=shape),
            "logprobs": now + random.normal(size=shape) * 0.5,
            "old": now + random.normal(size=shape) * 0.4,
            "reference": now + random.normal(size=shape),
        }


def log_softmax(logits: Matrix) -> Matrix:
    z = logits - logits.max(-1, keepdims=True)
    out: Matrix = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return out


def logprobs(logits: Matrix, target: Any) -> Matrix:
    return np.take_along_axis(log_softmax(logits), target[..., None], -1)[..., 0]


def published(batch: Batch, logits: Matrix, mode: str, options: dict[str, Any]) -> float:
    """The loss at `logits`, what a formula stops the gradient of taken at `batch.logits`."""
    o = {"surrogate": "clip", "ratio": "token", "old": "train", "clip_low": 0.2, "clip_high": 0.2} | options
    f, mask = batch.fields, batch.mask.astype(float)
    logp, stopped = logprobs(logits, batch.target), logprobs(batch.logits, batch.target)
    old = f["logprobs"] if o["old"] == "rollout" else f["old"]
    counts = mask.sum(-1, keepdims=True)
    ratio = np.exp(logp - old)
    if o["ratio"] == "sequence":
        ratio = np.exp(((logp - old) * mask).sum(-1, keepdims=True) / counts) * np.ones_like(mask)
        # GSPO-token: where advantages differ inside of a sequence, each token has its own.
        fixed = np.exp(((stopped - old) * mask).sum(-1, keepdims=True) / counts)
        ratio = fixed * np.exp(logp - stopped)
    low, high = 1 - o["clip_low"], 1 + o["clip_high"]
    advantages = f["advantages"]
    if o["surrogate"] == "cispo":
        loss = -np.clip(np.exp(stopped - old), low, high) * advantages * logp
    else:
        loss = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, low, high))
        if "clip_dual" in o:
            loss = np.where(advantages < 0, np.minimum(loss, -advantages * o["clip_dual"]), loss)
    kept = batch.mask
    if "weight" in o:
        log = old - f["logprobs"]
        log = log if o["weight"] == "token" else (log * mask).sum(-1, keepdims=True) * np.ones_like(mask)
        least, most = o.get("weight_min", 0.0), o.get("weight_max", 2.0)
        weight = np.exp(log)
        if o.get("weight_outside", "cap") == "cap":
            weight = np.clip(weight, least, most)
        else:
            kept = kept & (weight >= least) & (weight <= most)
        loss = weight * loss
    if "kl" in o:
        d = logp - f["reference"]
        at = stopped - f["reference"]
        values = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
        fixed = {"k1": at, "k3": np.exp(-at) - 1 + at}
        kl = values[o["kl"]] if o["kl"] in values else fixed[o["kl"][:2]] + d**2 / 2 - at**2 / 2
        loss = loss + o["kl_coef"] * kl
    if "entropy_coef" in o:
        every = log_softmax(logits)
        loss = loss + o["entropy_coef"] * (np.exp(every) * every).sum(-1)
    return aggregated(loss, kept, mode)


def aggregated(loss: Matrix, kept: Any, mode: str) -> float:
    """verl's agg_loss; a sequence of which nothing is kept is none."""
    sums, counts = (loss * kept).sum(-1), kept.sum(-1)
    sequences = (counts > 0).sum()
    if mode == "token-mean":
        return float(sums.sum() / counts.sum())
    if mode == "seq-mean-token-mean":
        return float((sums / np.maximum(counts, 1)).sum() / sequences)
    return float(sums.sum() / sequences / (LENGTH if mode.endswith("norm") else 1))


def ours(
    batch: Batch, loss: Any, mode: Any, micros: list[list[int]], temperature: float = 1.0
) -> tuple[float, Matrix, dict[str, float]]:
    """Loss, its gradient by the logits, and the sums, over micro-batches of sequences. The head is the identity."""
    layer = torch.nn.Linear(VOCABULARY, VOCABULARY, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(VOCABULARY))
    head, total, gradient = Head(layer, temperature), dict[str, float](), np.zeros_like(batch.logits)
    for micro in micros:
        rows = np.zeros_like(batch.mask)
        rows[micro] = batch.mask[micro]
        # In no order: a micro-batch lays its tokens down as it likes.
        order = np.random.default_rng(len(micro)).permutation(np.count_nonzero(rows))
        at = tuple(axis[order] for axis in np.nonzero(rows))
        given = Given(
            {name: torch.from_numpy(values[at]) for name, values in batch.fields.items()},
            torch.from_numpy(np.searchsorted(np.unique(at[0]), at[0])),
            len(micro),
        )
        targets = Targets(torch.arange(len(order)), torch.from_numpy(batch.target[at]))
        found = head.backward(torch.from_numpy(batch.logits[at]), targets, given, loss, mode)
        gradient[at] = found.dhidden_UD.numpy()
        for name, value in found.sums.items():
            total[name] = total.get(name, 0.0) + value
    by = divisor(
        mode, LENGTH if mode.endswith("norm") else None, total["kept_tokens"], total["kept_sequences"]
    )
    return total["loss"] / by, gradient / by, total


OPTIONS: list[dict[str, Any]] = [
    {},
    {"old": "rollout"},
    {"clip_low": 0.1, "clip_high": 0.28},
    {"clip_dual": 1.3},
    {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.05},
    {"ratio": "sequence", "old": "rollout", "clip_dual": 1.2},
    {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    {"weight": "token"},
    {"weight": "token", "weight_min": 0.8, "weight_max": 1.2},
    {"weight": "sequence", "weight_max": 1.1},
    {"weight": "token", "weight_outside": "drop", "weight_min": 0.7, "weight_max": 1.4},
    {"weight": "sequence", "weight_outside": "drop", "weight_min": 0.5, "weight_max": 1.6},
    {"ratio": "sequence", "weight": "token", "weight_outside": "drop", "weight_max": 1.2},
    *({"kl": kind, "kl_coef": 0.3} for kind in ("k1", "k2", "k3", "k1+", "k3+")),
    {"entropy_coef": 0.2},
    {
        "surrogate": "cispo",
        "weight": "sequence",
        "weight_outside": "drop",
        "weight_max": 1.3,
        "kl": "k2",
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
    },
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "ppo"
)
def test_loss_and_gradient_are_those_of_the_published_formula(mode: str, options: dict[str, Any]) -> None:
    batch = Batch(seed=len(str(options)))
    for micros in ([[0, 1, 2, 3]], [[3], [2, 0], [1]]):
        value, gradient, _ = ours(batch, policy_gradient(**options), mode, micros)
        assert value == pytest.approx(published(batch, batch.logits, mode, options), rel=1e-12)
        np.testing.assert_allclose(gradient, differences(batch, mode, options), rtol=1e-6, atol=1e-8)


def differences(batch: Batch, mode: str, options: dict[str, Any], step: float = 1e-5) -> Matrix:
    """The derivative by each logit of the tokens that count, from both sides."""
    gradient = np.zeros_like(batch.logits)
    for at in zip(*np.nonzero(batch.mask), strict=True):
        for token in range(VOCABULARY):
            moved = [batch.logits.copy(), batch.logits.copy()]
            moved[0][*at, token] += step
            moved[1][*at, token] -= step
            up, down = (published(batch, logits, mode, options) for logits in moved)
            gradient[*at, token] = (up - down) / (2 * step)
    return gradient


def test_the_batch_of_the_formulas_has_tokens_on_both_sides_of_every_bound() -> None:
    """Else the test above would compare little."""
    for options in OPTIONS:
        batch = Batch(seed=len(str(options)))
        _, _, total = ours(batch, policy_gradient(**options), "token-mean", [[0, 1, 2, 3]])
        assert 0 < total["clipped"] < sum(LENGTHS)
        if options.get("weight_outside") == "drop":
            assert 0 < total["kept_tokens"] == total["kept"] < sum(LENGTHS)


@pytest.mark.parametrize("mode", MODES)
def test_the_temperature_divides_logits_in_loss_and_gradient(mode: str) -> None:
    batch, options = Batch(seed=3), {"entropy_coef": 0.1, "ratio": "sequence"}
    warm = Batch(seed=3)
    warm.logits = batch.logits / 0.7
    value, gradient, _ = ours(batch, policy_gradient(**options), mode, [[0, 1, 2, 3]], temperature=0.7)
    assert value == pytest.approx(published(warm, warm.logits, mode, options), rel=1e-12)
    np.testing.assert_allclose(gradient, differences(warm, mode, options) / 0.7, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_L6_tokens_that_a_tool_wrote_and_that_importance_leaves_out_are_in_no_sum_and_no_denominator(
    mode: str,
) -> None:
    """What is left is as if the rest had never been sampled; a sequence without a token left is none."""
    batch = Batch(seed=5)
    batch.mask[2, 1:3] = False  # a tool's answer
    far = np.zeros_like(batch.mask)
    far[0, 1] = far[1, 0] = far[2, 4] = True  # the second sequence has no other token
    batch.fields["logprobs"] = np.where(far, batch.fields["old"] - 3, batch.fields["old"] - 0.1)
    loss = policy_gradient(weight="token", weight_outside="drop")
    value, gradient, total = ours(batch, loss, mode, [[0, 1], [2, 3]])
    assert (total["kept_tokens"], total["kept_sequences"]) == (6, 3)
    assert (gradient[far] == 0).all()
    batch.mask &= ~far
    without, gradient_without, _ = ours(batch, loss, mode, [[0, 2, 3]])
    assert value == pytest.approx(without, rel=1e-13)
    np.testing.assert_allclose(gradient, gradient_without, rtol=1e-12, atol=1e-16)


def test_a_loss_that_is_not_marked_for_what_it_does_is_refused() -> None:
    batch = Batch(seed=1)

    def drops(tokens: Tokens) -> Losses:
        return Losses(-tokens.logprobs, kept=tokens.logprobs > -1)

    with pytest.raises(ValueError, match=r"decorate it with token_loss\(masks=True\)"):
        ours(batch, drops, "token-mean", [[0, 1, 2, 3]])
    ours(batch, token_loss(masks=True)(drops), "token-mean", [[0, 1, 2, 3]])
    with pytest.raises(TypeError, match="the loss returned a Tensor; return"):
        ours(batch, lambda tokens: -tokens.logprobs, "token-mean", [[0]])
    with pytest.raises(ValueError, match=r"the loss's x returned shape \[\] for 3 tokens"):
        ours(batch, lambda t: Losses(-t.logprobs, {"x": t.entropy.sum()}), "token-mean", [[0]])
