"""Groups: the trajectories of one uid, which a group-relative estimator compares with each other.

Common to all of them: a trajectory counts once however many leaves it has, and its leaves are rewarded alike. A
trajectory without a score is left out, and its own advantage is 0. A group of one, and one whose scores differ by no
more than rounding, give exactly 0: there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64

from flowgraph import Array, Mask, Scalars, TiledOver, hop
from hops.candidates import alike

Vector = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Sampled = Annotated[Bool[Array, "token"], Mask()]
WithheldScores = Float32[Array, "withheld"]
WithheldUids = Int64[Array, "withheld"]
TOGETHER = {"withheld_score": "withheld_uid", "withheld_uid": "withheld_score"}


class Advantages(NamedTuple):
    """out: f32[token], the advantage: the same on every sampled token of a leaf, 0 elsewhere

    metrics: those of `by_group`
    """

    out: Annotated[Float32[Array, "token"], TiledOver("leaf")]
    metrics: Annotated[dict[str, float], Scalars()]


class ByGroup(NamedTuple):
    """metrics: `groups`, how many; of these the shares that teach nothing: `alone`, with fewer than two scores, and
    `equal`. Of those with a score the shares `all_right` (every score at least 1), `all_wrong` (none above 0) and
    `mixed` (neither), and `best`, the mean of their best scores. `spread`, the mean standard deviation (n − 1) within
    those of two or more
    """

    metrics: Annotated[dict[str, float], Scalars()]


class Group(NamedTuple):
    """The scored trajectories of one uid.

    score_M: f64[member], one entry a trajectory; those that are withheld come last
    length_M: f64[member], their sampled tokens
    row_R: the rows of the batch that are their leaves; member_R: whose leaf each is; own_R: f64, its own score
    """

    score_M: Vector
    length_M: Vector
    row_R: Ints
    member_R: Ints
    own_R: Vector

    @property
    def alone(self) -> bool:
        return len(self.score_M) < 2

    @property
    def equal(self) -> bool:
        """Dividing by a standard deviation of 1e-17 would turn noise into signal."""
        return not self.alone and alike(self.score_M.tolist())


class Groups:
    """A batch's leaves and the withheld members, group by group.

    score, scored, uid, trajectory: one entry a leaf; sampled: sampled tokens of each. withheld_*: members of these
    groups that are not in the batch. Raises ValueError naming the uid for a score that is not finite.
    """

    def __init__(
        self,
        score: Any,
        scored: Any,
        uid: Any,
        trajectory: Any,
        sampled: Any = None,
        withheld_score: Any = None,
        withheld_uid: Any = None,
        withheld_length: Any = None,
    ) -> None:
        score_L = score.astype(np.float64)
        score_W = np.zeros(0) if withheld_score is None else withheld_score.astype(np.float64)
        uid_W = np.zeros(0, np.int64) if withheld_uid is None else withheld_uid
        sampled_L = np.zeros(len(uid)) if sampled is None else sampled
        sampled_W = np.zeros(len(uid_W)) if withheld_length is None else withheld_length
        if len(score_W) != len(uid_W):
            raise ValueError(
                f"{len(score_W)} withheld scores and {len(uid_W)} uids; wire both withheld ports"
            )
        refuse_infinite("score", score_L, uid, scored)
        refuse_infinite("score", score_W, uid_W, np.ones(len(uid_W), np.bool_))
        self.leaves = len(uid)
        self.all: list[Group] = []
        for one in np.unique(uid):
            row_R = np.flatnonzero((uid == one) & scored)
            _, first, member_R = np.unique(trajectory[row_R], return_index=True, return_inverse=True)
            apart = uid_W == one
            score_M = np.concatenate([score_L[row_R[first]], score_W[apart]])
            length_M = np.bincount(member_R, sampled_L[row_R], len(first))
            self.all.append(
                Group(
                    score_M,
                    np.concatenate([length_M, sampled_W[apart]]),
                    row_R,
                    member_R,
                    score_L[row_R],
                )
            )

    def each(self, estimate: Callable[[Group], Vector]) -> Vector:
        """f64[leaf]: what `estimate` says of the rows of each group, and 0 where a group teaches nothing."""
        out_L = np.zeros(self.leaves)
        for group in self.all:
            if not (group.alone or group.equal):
                out_L[group.row_R] = estimate(group)
        return out_L

    def where(self, holds: Callable[[Group], bool]) -> Bools:
        """bool[leaf]: the scored leaves of groups for which that holds."""
        out_L = np.zeros(self.leaves, np.bool_)
        for group in self.all:
            out_L[group.row_R] = holds(group)
        return out_L

    def metrics(self) -> dict[str, float]:
        """See `ByGroup`."""
        scores = [group.score_M for group in self.all if len(group.score_M)]
        right = _share([bool((s_M >= 1).all()) for s_M in scores])
        wrong = _share([bool((s_M <= 0).all()) for s_M in scores])
        metrics = {
            "groups": float(len(self.all)),
            "alone": _share([group.alone for group in self.all]),
            "equal": _share([group.equal for group in self.all]),
        }
        if scores:
            metrics |= {"all_right": right, "all_wrong": wrong, "mixed": 1 - right - wrong}
            metrics["best"] = float(np.mean([s_M.max() for s_M in scores]))
        compared = [s_M.std(ddof=1) for s_M in scores if len(s_M) > 1]
        return metrics | ({"spread": float(np.mean(compared))} if compared else {})


@hop(owner="trainer", lifetime="step", needs=TOGETHER)
def by_group(
    score: Float32[Array, "leaf"],
    scored: Bool[Array, "leaf"],
    uid: Int64[Array, "leaf"],
    trajectory: Int64[Array, "leaf"],
    withheld_score: WithheldScores | None = None,
    withheld_uid: WithheldUids | None = None,
) -> ByGroup:
    """How the rewards of a batch lie in its groups. Ports and errors are those of `grpo`."""
    groups = Groups(score, scored, uid, trajectory, withheld_score=withheld_score, withheld_uid=withheld_uid)
    return ByGroup(groups.metrics())


def estimate_groups(
    estimate: Callable[[Group], Vector],
    score: Any,
    scored: Any,
    uid: Any,
    trajectory: Any,
    response_mask: Any,
    leaf_offsets: Any,
    *withheld: Any,
) -> Advantages:
    """What a group-relative hop does with its ports, given what it makes of one group: f64[row of the group]."""
    groups = Groups(score, scored, uid, trajectory, sampled_tokens(response_mask, leaf_offsets), *withheld)
    out_T = tile(groups.each(estimate), response_mask, leaf_offsets)
    return Advantages(out_T.astype(np.float32), groups.metrics())


def sampled_tokens(response_mask: Any, leaf_offsets: Any) -> Ints:
    """i64[leaf]."""
    before_T: Ints = np.concatenate([[0], np.cumsum(response_mask)])
    counts_L: Ints = np.diff(before_T[leaf_offsets])
    return counts_L


def tile(value_L: Any, response_mask: Any, leaf_offsets: Any) -> Any:
    """[token]: the leaf's value on its sampled tokens, 0 elsewhere."""
    return np.where(response_mask, np.repeat(value_L, np.diff(leaf_offsets)), 0)


def refuse_infinite(what: str, value_N: Any, uid_N: Any, where_N: Any) -> None:
    """Raise ValueError naming the uid of the first that is not finite, where it counts."""
    bad = np.flatnonzero(where_N & ~np.isfinite(value_N))
    if len(bad):
        raise ValueError(f"uid {uid_N[bad[0]]}: {what} {value_N[bad[0]]} is not finite")


def whiten(value_T: Vector, counts_T: Bools, eps: float) -> Vector:
    """f64[token]: (x − mean) / √(variance + eps) where it counts, 0 elsewhere; the variance is the sample's (n − 1).

    Values that differ by no more than rounding, and a single one, give exactly 0.
    """
    x_N = value_T[counts_T]
    out_T = np.zeros(len(value_T))
    if len(x_N) > 1 and not alike(extremes(x_N)):
        out_T[counts_T] = (x_N - x_N.mean()) / np.sqrt(x_N.var(ddof=1) + eps)
    return out_T


def extremes(value_N: Vector) -> Sequence[float]:
    return float(value_N.min()), float(value_N.max())


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / max(1, len(flags))
