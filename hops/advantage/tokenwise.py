"""Estimators that give each token a value of its own, from the rewards that come after it.

The chain runs along the sampled tokens of a leaf. Observations between them are no step: they neither end it nor cost a
discount, and what is rewarded there counts for the sampled token before. A token that several leaves of a fork share is
trained in one of them, and its chain is that leaf's: what another branch earned is credited from the fork on. The last
sampled token of a leaf ends the chain: no value is taken beyond it, whether the response is finished or cut off.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64

from flowgraph import Array, Scalars, hop
from hops.advantage.groups import (
    Bools,
    Ints,
    Sampled,
    Vector,
    refuse_infinite,
    sampled_tokens,
    whiten,
)


class TokenAdvantages(NamedTuple):
    """advantages: f32[token], 0 where nothing was sampled

    metrics, over sampled tokens of scored leaves: `return`, the mean, and `return_std`, before whitening
    """

    advantages: Float32[Array, "token"]
    metrics: Annotated[dict[str, float], Scalars()]


class ValueAdvantages(NamedTuple):
    """advantages, returns: f32[token], 0 where nothing was sampled; returns are what the critic should have said

    metrics, over sampled tokens of scored leaves: `return` and `value`, means; `advantage_std`, before whitening
    """

    advantages: Float32[Array, "token"]
    returns: Float32[Array, "token"]
    metrics: Annotated[dict[str, float], Scalars()]


def _check(*, gamma: float = 1.0, lam: float = 1.0, whitened: bool = True, eps: float = 1e-8) -> None:
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], not {value}")


@hop(owner="trainer", lifetime="step", validate=_check)
def reinforce_pp(
    token_level_rewards: Float32[Array, "token"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    *,
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> TokenAdvantages:
    """(G_t − mean G) / √(var G + eps) with the return G_t = r_t + gamma · G_{t+1}, over the batch's sampled tokens.

    Source: REINFORCE++ (arXiv 2501.03262). Mean and variance (n − 1) are over all sampled tokens of scored leaves.

    token_level_rewards: f32[token], of any number of tokens; scored, uid: one entry a leaf. An unscored leaf gets 0.
    Raises ValueError naming the uid for a reward that is not finite.
    """
    chain = _Chain(response_mask, leaf_offsets, scored, uid)
    return_N = chain.backwards(chain.rewards(token_level_rewards), gamma)
    counts_N = chain.scored_N
    metrics = _moments("return", return_N[counts_N]) if counts_N.any() else {}
    return TokenAdvantages(chain.lay(whiten(return_N, counts_N, eps)), metrics)


@hop(owner="trainer", lifetime="step", validate=_check)
def gae(
    token_level_rewards: Float32[Array, "token"],
    values: Float32[Array, "token"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whitened: bool = True,
    eps: float = 1e-8,
) -> ValueAdvantages:
    """A_t = δ_t + gamma · lam · A_{t+1} with δ_t = r_t + gamma · V_{t+1} − V_t; returns are A_t + V_t.

    Source: generalised advantage estimation (arXiv 1506.02438), equations 11 to 16, as PPO uses it (arXiv 1707.06347).

    values: f32[token], what the critic expects before the token is sampled; other ports are those of `reinforce_pp`.
    whitened: advantages, not returns, are whitened over the batch's sampled tokens: (A − mean A) / √(var A + eps).
    An unscored leaf gets advantage 0, and its values as returns, so that it teaches neither actor nor critic.
    Raises ValueError naming the uid for a reward or a value that is not finite.
    """
    chain = _Chain(response_mask, leaf_offsets, scored, uid)
    value_N = values[response_mask].astype(np.float64)
    refuse_infinite("value", value_N, uid[chain.leaf_N], np.ones(len(value_N), np.bool_))
    delta_N = chain.rewards(token_level_rewards) + gamma * chain.following(value_N) - value_N
    counts_N = chain.scored_N
    advantage_N = np.where(counts_N, chain.backwards(delta_N, gamma * lam), 0.0)
    return_N = advantage_N + value_N
    metrics = {}
    if counts_N.any():
        metrics = {
            "return": float(return_N[counts_N].mean()),
            "value": float(value_N[counts_N].mean()),
            "advantage_std": float(advantage_N[counts_N].std()),
        }
    shown_N = whiten(advantage_N, counts_N, eps) if whitened else advantage_N
    return ValueAdvantages(chain.lay(shown_N), chain.lay(return_N), metrics)


class _Chain:
    """The N sampled tokens of a batch, leaf by leaf. leaf_N: whose each is; scored_N: whether that leaf has a score."""

    def __init__(self, response_mask: Any, leaf_offsets: Any, scored: Any, uid: Any) -> None:
        self._mask_T: Bools = response_mask
        self._offsets: Ints = leaf_offsets
        self._count_L = sampled_tokens(response_mask, leaf_offsets)
        self._scored_L, self._uid_L = scored, uid
        self.leaf_N = np.repeat(np.arange(len(self._count_L)), self._count_L)
        self.scored_N: Bools = scored[self.leaf_N]

    def rewards(self, reward_T: Any) -> Vector:
        """f64[N]: the reward of each sampled token and of what follows it up to the next; none before the first."""
        leaf_T = np.repeat(np.arange(len(self._count_L)), np.diff(self._offsets))
        refuse_infinite("reward", reward_T, self._uid_L[leaf_T], self._scored_L[leaf_T])
        last_T = np.cumsum(self._mask_T) - 1
        has_T = last_T >= (np.cumsum(self._count_L) - self._count_L)[leaf_T]
        has_T &= self._scored_L[leaf_T]
        reward_N = np.zeros(len(self.leaf_N))
        np.add.at(reward_N, last_T[has_T], reward_T[has_T])
        return reward_N

    def following(self, value_N: Vector) -> Vector:
        """f64[N]: the value of the next sampled token of the leaf, 0 after the last."""
        next_N = np.zeros(len(value_N))
        within_N = self.leaf_N[1:] == self.leaf_N[:-1]
        next_N[:-1] = np.where(within_N, value_N[1:], 0.0)
        return next_N

    def backwards(self, x_N: Vector, decay: float) -> Vector:
        """f64[N]: y_n = x_n + decay · y_{n+1} along each leaf, by one operation on all leaves for each step back."""
        y_N = x_N.copy()
        longest_first = np.argsort(-self._count_L, kind="stable")
        count_L = self._count_L[longest_first]
        last_L = (np.cumsum(self._count_L) - 1)[longest_first]
        for step in range(1, int(count_L.max(initial=0))):
            at = last_L[: np.searchsorted(-count_L, -step)] - step
            y_N[at] += decay * y_N[at + 1]
        return y_N

    def lay(self, value_N: Vector) -> Any:
        """f32[token]."""
        out_T = np.zeros(len(self._mask_T), np.float32)
        out_T[self._mask_T] = value_N
        return out_T


def _moments(name: str, value_N: Vector) -> dict[str, float]:
    return {name: float(value_N.mean()), f"{name}_std": float(value_N.std())}
