"""Policy losses, handed to the learner: what each sampled token adds to the loss.

A loss is made by a factory with keyword configuration and has flowgraph's `TokenLoss` type. The learner adds tokens up
and divides (`aggregate` of the train hop). It reads these fields, one value a token:

    advantages   what the token is worth
    logprobs     of the rollout, with which it was sampled
    old          of the learner before the first optimiser step of this batch; where it is not given, the batch has one
                 step, and they are the present ones
    reference    of a frozen model that the policy is held near
"""

from __future__ import annotations

import typing
from typing import Any, Literal

from flowgraph import Losses, TokenLoss, Tokens, token_loss
from hops.loss_terms import Kl, Level, exp, importance_weights, kl_to_reference, likelihood_ratio, read

Surrogate = Literal["clip", "cispo"]
Outside = Literal["cap", "drop"]


def policy_gradient(
    *,
    surrogate: Surrogate = "clip",
    ratio: Level = "token",
    old: Literal["train", "rollout"] = "train",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    weight: Level | None = None,
    weight_outside: Outside | None = None,
    weight_min: float | None = None,
    weight_max: float | None = None,
    kl: Kl | None = None,
    kl_coef: float | None = None,
    entropy_coef: float = 0.0,
) -> TokenLoss:
    """w · surrogate + kl_coef · KL - entropy_coef · H, per token; each part is there when it is asked for.

    surrogate, with A the advantage and r the ratio π / π_old:
        clip: -min(r · A, clip(r, 1 - clip_low, 1 + clip_high) · A), PPO's (arXiv 1707.06347, equation 7). Separate
            bounds are DAPO's clip-higher (arXiv 2503.14476). With `clip_dual` c > 1 it is at most -c · A where A < 0,
            so that a token that became likely can't pull without limit (dual clip, arXiv 1912.09729)
        cispo: -sg[clip(r, 1 - clip_low, 1 + clip_high)] · A · logp (arXiv 2506.13585): every token has a gradient, of
            limited weight
    ratio: r of each token, or of the sequence (GSPO; see `loss_terms.likelihood_ratio`)
    old: whose log-probabilities the ratio is taken against.
        train: the learner's own before the batch's first step. With one step a batch the ratio is exactly 1, nothing
            is clipped, and the gradient is that of -A · logp (REINFORCE)
        rollout: those that the tokens were sampled with: off-policy by lag and by the engine's numerics
    weight: w = π_old / π_rollout, of each token or of the sequence (see `loss_terms.importance_weights`); 1 when left
        out. Beside `old: train` this is decoupled PPO for asynchronous data (AReaL, arXiv 2505.24298)
    weight_outside, weight_min, weight_max: cap (the default) limits w to [weight_min, weight_max], by default [0, 2];
        drop leaves out what lies outside, in the numerator and in the denominator of the loss
    kl, kl_coef: an estimator of the divergence from `reference` (see `loss_terms.kl_to_reference`), which of them have
        the right gradient is said there: k2, k1+ and k3+
    entropy_coef: of the entropy of the distribution that the token was drawn from, as a bonus

    Metrics: clipped, the share of tokens whose ratio is outside of the bounds on the side that matters (clip: they pass
    no gradient); entropy and those of the distributions of `ratio`, `logprob_gap` = |logp - logp_rollout|, and
    `weight`: mean, NAME_p05, NAME_p50, NAME_p95, NAME_max; rollout_kl, KL(π_rollout ‖ π) by k3; kl; kept, the share of
    tokens that drop left. Those of the rollout and of the reference where these are given.

    Raises ValueError for a value out of range and for options that contradict each other.
    """
    low, high = _checked(
        surrogate, ratio, old, clip_low, clip_high, clip_dual, weight, weight_outside, weight_min, weight_max
    )
    _check_terms(kl, kl_coef, entropy_coef)
    whole = "sequence" in (ratio, weight)
    reads = ("trajectory",) * whole + ("reference",) * (kl is not None)

    @token_loss(whole=whole, masks=weight_outside == "drop", reads=reads, before=old == "train")
    def loss(tokens: Tokens) -> Losses:
        before = _before(tokens, old)
        r = likelihood_ratio(before, tokens, ratio)
        bounds = (1 - clip_low, 1 + clip_high, clip_dual)
        value, clipped = (_clip if surrogate == "clip" else _cispo)(
            r, read(tokens, "advantages"), tokens, *bounds
        )
        metrics, spread, kept = {"clipped": clipped}, {"ratio": r.detach()}, None
        if "logprobs" in tokens.fields:
            d = tokens.logprobs.detach() - tokens.fields["logprobs"]
            spread["logprob_gap"] = d.abs()
            metrics["rollout_kl"] = exp(d) - 1 - d
        if weight is not None:
            w, kept = importance_weights(before, tokens, weight, weight_outside or "cap", low, high)
            value = w * value
            spread["weight"] = w
            metrics |= {} if kept is None else {"kept": kept.to(w.dtype)}
        if kl is not None or "reference" in tokens.fields:
            distance = kl_to_reference(tokens.logprobs, read(tokens, "reference"), kl or "k3")
            value = value + kl_coef * distance if kl_coef else value
            metrics["kl"] = distance.detach()
        if entropy_coef:
            value = value - entropy_coef * tokens.entropy
        return Losses(value, metrics, kept, spread)

    return loss


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **options: Any) -> TokenLoss:
    """Group sequence policy optimisation: `policy_gradient` with the ratio of the sequence, and bounds that fit it.

    Source: arXiv 2507.18071; its bounds are small because the ratio is a mean over the tokens. It goes with
    `aggregate: seq-mean-token-mean`. options: the others of `policy_gradient`.
    """
    if "ratio" in options:
        raise ValueError("the ratio of gspo is that of the sequence: leave ratio out, or use policy_gradient")
    return policy_gradient(ratio="sequence", clip_low=clip_low, clip_high=clip_high, **options)


def cispo(*, clip_low: float = 1.0, clip_high: float = 4.0, **options: Any) -> TokenLoss:
    """Clipped importance weights: `policy_gradient` with the surrogate cispo, and a bound on one side only: r ≤ 5.

    Source: MiniMax-M1, arXiv 2506.13585, which leaves the lower bound out and tunes the upper; 5 is ScaleRL's
    (arXiv 2510.13786). options: the others of `policy_gradient`.
    """
    if "surrogate" in options:
        raise ValueError("the surrogate of cispo is its own: leave surrogate out, or use policy_gradient")
    return policy_gradient(surrogate="cispo", clip_low=clip_low, clip_high=clip_high, **options)


def _before(tokens: Tokens, old: str) -> Any:
    if old == "rollout":
        return read(tokens, "logprobs")
    return tokens.fields["old"] if "old" in tokens.fields else tokens.logprobs.detach()


def _clip(
    r: Any, advantages: Any, tokens: Tokens, low: float, high: float, dual: float | None
) -> tuple[Any, Any]:
    import torch

    plain = r * advantages
    bounded = r.clamp(low, high) * advantages
    gain = torch.minimum(plain, bounded)
    clipped = bounded < plain
    if dual is not None:
        least = torch.where(advantages < 0, dual * advantages, -torch.inf)
        clipped = clipped | (gain < least)
        gain = torch.maximum(gain, least)
    return -gain, clipped.detach().to(gain.dtype)


def _cispo(
    r: Any, advantages: Any, tokens: Tokens, low: float, high: float, dual: float | None
) -> tuple[Any, Any]:
    bounded = r.detach().clamp(low, high)
    return -bounded * advantages * tokens.logprobs, (bounded != r.detach()).to(r.dtype)


def _checked(
    surrogate: str,
    ratio: str,
    old: str,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
    weight: str | None,
    outside: str | None,
    low: float | None,
    high: float | None,
) -> tuple[float, float]:
    """The bounds of the weights. Raises ValueError."""
    _among("surrogate", surrogate, typing.get_args(Surrogate))
    _among("ratio", ratio, typing.get_args(Level))
    _among("old", old, ("train", "rollout"))
    if not (0 <= clip_low <= 1 and 0 <= clip_high < float("inf")):
        raise ValueError(
            f"clip_low must be in [0, 1] and clip_high not negative, not {clip_low} and {clip_high}"
        )
    if clip_dual is not None and not (surrogate == "clip" and 1 < clip_dual < float("inf")):
        why = f"above 1, not {clip_dual}" if surrogate == "clip" else f"left out with surrogate {surrogate}"
        raise ValueError(f"clip_dual must be {why}")
    if weight is None:
        given = {"weight_outside": outside, "weight_min": low, "weight_max": high}
        for name in (name for name, value in given.items() if value is not None):
            raise ValueError(f"{name} says nothing without weight; add weight: token, or leave it out")
        return 0.0, 0.0
    _among("weight", weight, typing.get_args(Level))
    _among("weight_outside", outside or "cap", typing.get_args(Outside))
    if old == "rollout":
        raise ValueError(
            "weight corrects from the rollout to old: train; with old: rollout the ratio does so already: leave one out"
        )
    low, high = 0.0 if low is None else low, 2.0 if high is None else high
    if not 0 <= low < high < float("inf"):
        raise ValueError(f"weight_min must be at least 0 and weight_max above it, not {low} and {high}")
    return low, high


def _check_terms(kl: str | None, kl_coef: float | None, entropy_coef: float) -> None:
    if kl is not None:
        _among("kl", kl, typing.get_args(Kl))
    if (kl is None) != (kl_coef is None):
        had, lacks = ("kl", "kl_coef: 0.001") if kl_coef is None else ("kl_coef", "kl: k3")
        raise ValueError(f"{had} needs the other half too; add {lacks}, or leave it out")
    for name, value in (("kl_coef", kl_coef or 0.0), ("entropy_coef", entropy_coef)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, not {value}")


def _among(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(map(str, known))}, not {value!r}")
