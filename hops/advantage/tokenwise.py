"""Estimators that give each token a value of its own, from the rewards that come after it.

The chain runs along the sampled tokens of a trajectory in the order in which they were sampled, over all of its leaves:
what its last turn earned is credited to the turns before, also where a fork put them into other leaves. Each token is
on it once, where it is trained. Observations between are no step: they neither end the chain nor cost a discount, and
what is rewarded there counts for the leaf's sampled token before. The last token ends the chain: no value is taken
beyond it, whether the response is finished or cut off.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

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
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    sampled: Int32[Array, "token"] | None = None,
    *,
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> TokenAdvantages:
    """(G_t − mean G) / √(var G + eps) with the return G_t = r_t + gamma · G_{t+1}, over the batch's sampled tokens.

    Source: REINFORCE++ (arXiv 2501.03262). Mean and variance (n − 1) are over all sampled tokens of scored leaves.

    token_level_rewards: f32[token], of any number of tokens; scored, uid, trajectory: one entry a leaf. An unscored
    leaf gets 0.
    sampled: i32[token], each token's number in its trajectory (`hops.rollout.episode`); it may be left out where every
    trajectory has one leaf.
    Raises ValueError naming the uid for a reward that is not finite, and the trajectory whose several leaves lack
    `sampled`.
    """
    chain = _Chain(response_mask, leaf_offsets, scored, uid, trajectory, sampled)
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
    trajectory: Int64[Array, "leaf"],
    response_mask: Sampled,
    leaf_offsets: Int64[Array, "leaf+1"],
    sampled: Int32[Array, "token"] | None = None,
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
    Raises ValueError as `reinforce_pp`, and naming the uid for a value that is not finite.
    """
    chain = _Chain(response_mask, leaf_offsets, scored, uid, trajectory, sampled)
    value_N = values[chain.at_N].astype(np.float64)
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
    """The N sampled tokens of a batch, trajectory by trajectory, each in the order in which it was sampled.

    at_N: where in the batch each is; leaf_N: whose it is; scored_N: whether that leaf has a score
    """

    def __init__(
        self, response_mask: Any, leaf_offsets: Any, scored: Any, uid: Any, trajectory: Any, sampled: Any
    ) -> None:
        count_L = sampled_tokens(response_mask, leaf_offsets)
        self._leaf_T = np.repeat(np.arange(len(count_L)), np.diff(leaf_offsets))
        self._before_L = np.cumsum(count_L) - count_L
        self._mask_T: Bools = response_mask
        self._scored_L, self._uid_L = scored, uid
        at_N = np.flatnonzero(response_mask)
        if sampled is None:
            _refuse_forks(trajectory[count_L > 0])
        number_N = at_N if sampled is None else sampled[at_N]
        self._order_N = np.lexsort((number_N, trajectory[self._leaf_T[at_N]]))
        self.at_N: Ints = at_N[self._order_N]
        self.leaf_N = self._leaf_T[self.at_N]
        self.scored_N: Bools = scored[self.leaf_N]
        _, self._count_I = np.unique(trajectory[self.leaf_N], return_counts=True)
        self._end_I = np.cumsum(self._count_I) - 1

    def rewards(self, reward_T: Any) -> Vector:
        """f64[N]: the reward of each sampled token and of what follows it in its leaf up to the next; none before the
        leaf's first.
        """
        leaf_T = self._leaf_T
        refuse_infinite("reward", reward_T, self._uid_L[leaf_T], self._scored_L[leaf_T])
        last_T = np.cumsum(self._mask_T) - 1
        has_T = (last_T >= self._before_L[leaf_T]) & self._scored_L[leaf_T]
        reward_N = np.zeros(len(self.at_N))
        np.add.at(reward_N, last_T[has_T], reward_T[has_T])
        return reward_N[self._order_N]

    def following(self, value_N: Vector) -> Vector:
        """f64[N]: the value of the next sampled token of the trajectory, 0 after the last."""
        next_N = np.append(value_N[1:], 0.0)[: len(value_N)]
        next_N[self._end_I] = 0.0
        return next_N

    def backwards(self, x_N: Vector, decay: float) -> Vector:
        """f64[N]: y_n = x_n + decay · y_{n+1} along each trajectory, by one operation on all for each step back."""
        y_N = x_N.copy()
        longest_first = np.argsort(-self._count_I, kind="stable")
        count_I, end_I = self._count_I[longest_first], self._end_I[longest_first]
        for step in range(1, int(count_I.max(initial=0))):
            at = end_I[: np.searchsorted(-count_I, -step)] - step
            y_N[at] += decay * y_N[at + 1]
        return y_N

    def lay(self, value_N: Vector) -> Any:
        """f32[token]."""
        out_T = np.zeros(len(self._mask_T), np.float32)
        out_T[self.at_N] = value_N
        return out_T


def _refuse_forks(trajectory_L: Ints) -> None:
    """Raise ValueError for a trajectory with several leaves that are trained: nothing says which was sampled first."""
    found, count = np.unique(trajectory_L, return_counts=True)
    for one, leaves in zip(found[count > 1], count[count > 1], strict=True):
        raise ValueError(
            f"trajectory {one} has {leaves} leaves, and nothing says in which order they were sampled; "
            "add sampled: batch under in: of the advantage hop"
        )


def _moments(name: str, value_N: Vector) -> dict[str, float]:
    return {name: float(value_N.mean()), f"{name}_std": float(value_N.std())}
