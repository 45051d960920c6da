"""Token losses: element-wise functions of log-probabilities, handed to the learner.

A loss is made by a factory with keyword configuration and has flowgraph's `TokenLoss` type:
(logprobs f32[n], entropy f32[n], fields: name → tensor[n]) → (loss f32[n], metrics: name → f32[n]).
n counts masked tokens; the learner sums, and divides by their global number. Entropy comes without a graph.
"""

from __future__ import annotations

from typing import Literal

from flowgraph import Losses, TokenLoss, Tokens


def policy_gradient(
    *, clip_low: float = 0.2, clip_high: float = 0.2, old: Literal["train", "rollout"] = "train"
) -> TokenLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7), negated, per token:

        loss = -min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A),  ratio = exp(logp - logp_old)

    with A = fields["advantages"]. Separate bounds are DAPO's clip-higher (arXiv 2503.14476).

    old: whose log-probabilities the ratio is taken against.
        "train": the learner's own, before the step. With one optimiser step per batch these are the current
            ones: the ratio is exactly 1, nothing is clipped, the gradient is that of -A · logp (REINFORCE).
        "rollout": fields["logprobs"], those the tokens were sampled with: off-policy by lag and by the
            engine's numerics.

    Metrics: `ratio`, `clipped` (share of tokens whose ratio is clipped, so that they pass no gradient), and,
    where fields["logprobs"] is present, `logprob_gap` = |logp - logp_rollout|.
    Raises ValueError for a negative bound, or clip_low above 1; KeyError for a missing field.
    """
    if not (0 <= clip_low <= 1 and 0 <= clip_high < float("inf")):
        raise ValueError(
            f"clip_low must be in [0, 1] and clip_high not negative, not {clip_low} and {clip_high}"
        )
    if old not in ("train", "rollout"):
        raise ValueError(f"old must be train or rollout, not {old!r}")

    def loss(tokens: Tokens) -> Losses:
        import torch

        logprobs, fields = tokens.logprobs, tokens.fields
        advantages = fields["advantages"]
        before = logprobs.detach() if old == "train" else fields["logprobs"]
        ratio = torch.exp(logprobs - before)
        plain = ratio * advantages
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
        metrics = {"ratio": ratio.detach(), "clipped": (clipped < plain).detach().float()}
        if "logprobs" in fields:
            metrics["logprob_gap"] = (logprobs.detach() - fields["logprobs"]).abs()
        return Losses(-torch.minimum(plain, clipped), metrics)

    return loss
