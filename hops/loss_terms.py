"""What policy losses are made of: ratios, importance weights, KL estimators. Element-wise over n tokens, in torch.

Everything here takes and gives tensors [n]; what is of a sequence stands at each of its tokens.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from flowgraph import Tokens

Level = Literal["token", "sequence"]
Kl = Literal["k1", "k2", "k3", "k1+", "k3+"]

# Beyond e^20 a ratio is no ratio but an overflow to come; verl cuts there too.
_LARGEST_LOG = 20.0


def exp(log: Any) -> Any:
    """exp of a log-ratio, constant beyond ±20."""
    return log.clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()


def sum_of_sequence(values: Any, tokens: Tokens) -> Any:
    """At each token the sum over its sequence."""
    return values.new_zeros(tokens.sequences).index_add(0, tokens.sequence, values)[tokens.sequence]


def mean_of_sequence(values: Any, tokens: Tokens) -> Any:
    """At each token the mean over its sequence."""
    import torch

    return sum_of_sequence(values, tokens) / sum_of_sequence(torch.ones_like(values), tokens)


def likelihood_ratio(old: Any, tokens: Tokens, level: Level) -> Any:
    """π / π_old of each token, with a graph.

    token: exp(logp - old). sequence: s_i = exp(mean over the sequence of logp - old), GSPO's ratio (arXiv 2507.18071,
    equation 7), in the form of its equation 14: sg[s_i] · π / sg[π]. It has the value of s_i, and where all advantages
    of a sequence are equal its gradient; where they differ, each token's gradient has its own.
    """
    log = tokens.logprobs - old
    if level == "sequence":
        own = tokens.logprobs - tokens.logprobs.detach()  # 0, with a gradient
        log = mean_of_sequence(log.detach(), tokens) + own
    return exp(log)


class Weights(NamedTuple):
    """weight: [n], limited or not; kept: bool[n], None where nothing is left out."""

    weight: Any
    kept: Any | None


def importance_weights(
    old: Any, tokens: Tokens, level: Level, outside: Literal["cap", "drop"], low: float, high: float
) -> Weights:
    """What turns an average over what was sampled into one over π_old: π_old / π_rollout, without a gradient.

    level: of each token, exp(old - rollout) (a little biased, of low variance), or of the sequence, the product of its
        tokens' (unbiased, and of a variance that grows with its length)
    outside: cap limits weights to [low, high] (truncated importance sampling, TIS; arXiv 1802.01561's ρ̄); drop leaves
        out the tokens, or whole sequences, whose weight is not in [low, high] (masked importance sampling, MIS, or
        IcePop), and leaves the others' as they are
    """
    log = old - read(tokens, "logprobs")
    weight = exp(sum_of_sequence(log, tokens) if level == "sequence" else log)
    if outside == "cap":
        return Weights(weight.clamp(low, high), None)
    return Weights(weight, (weight >= low) & (weight <= high))


def kl_to_reference(logprobs: Any, reference: Any, kind: Kl) -> Any:
    """An estimate of KL(π ‖ π_ref) of each token that π sampled; d = logp - logp_ref.

    k1: d. Unbiased. As a loss its gradient is 0 on average: it teaches nothing, and is to look at.
    k2: d² / 2. Biased, and the one whose gradient as a loss is that of KL(π ‖ π_ref).
    k3: exp(-d) - 1 + d. Unbiased, never negative, of low variance. As a loss its gradient is that of the other
        direction, KL(π_ref ‖ π), which agrees near d = 0; GRPO's choice (arXiv 2402.03300, equation 4).
    k1+, k3+: the value of k1 or k3, the gradient of k2.

    Source: Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    d = logprobs - reference
    k2 = d.square() / 2
    if kind == "k2":
        return k2
    value = d if kind.startswith("k1") else exp(-d) - 1 + d
    return value.detach() + k2 - k2.detach() if kind.endswith("+") else value


def read(tokens: Tokens, name: str) -> Any:
    """A field that the loss needs. Raises ValueError that says which input is missing."""
    if name not in tokens.fields:
        raise ValueError(
            f"the loss reads {name!r}, which it was not given; wire the input {name} of the train hop"
        )
    return tokens.fields[name]
