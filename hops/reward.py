"""Reward: what a function says of each response becomes one score a leaf, carried by its last token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from flowgraph import Array, Json, LastToken, Mask, Scalars, Tokenizer, hop
from hops.rows.example import unpack
from hops.scoring import Sample, score_now
from hops.signature import check_function


class Scored(NamedTuple):
    """score: 0 where scored is false. metrics: `reward`, the mean of scored leaves; `scored`, their share."""

    score: Float32[Array, "leaf"]
    scored: Bool[Array, "leaf"]
    token_level_rewards: Annotated[Float32[Array, "token"], LastToken("leaf")]
    metrics: Annotated[dict[str, float], Scalars()]


def _check(*, function: Callable[..., Any], arguments: dict[str, Any] | None = None) -> None:
    check_function(function, arguments)


@hop(maps="leaf", lifetime="consumed", validate=_check)
def score(
    tokens: Int32[Array, "token"],
    response_mask: Annotated[Bool[Array, "token"], Mask()],
    leaf_offsets: Int64[Array, "leaf+1"],
    ground_truth: Annotated[list[Any], Json("leaf")],
    uid: Int64[Array, "leaf"],
    *,
    tokenizer: Tokenizer,
    function: Callable[..., Any],
    arguments: dict[str, Any] | None = None,
) -> Scored:
    """Score every leaf with a function: TRL's, verl's or (completion, ground_truth); see `hops.signature`.

    The completion is the text of the leaf's tokens with response_mask 1, special tokens left out: what the
    model wrote, without the observations between. The prompt is the text of the tokens before the first of
    them. The score r_i stands on the last token with response_mask 1, and nowhere when the response is
    empty; it counts in its group either way. A function that gives None leaves the leaf unscored.

    arguments: further keyword arguments of the function (verl's `reward_kwargs`).
    Raises ValueError naming function and uid when the function raises or gives a number that is not finite.
    """
    samples = []
    last_L = np.full(len(uid), -1, np.int64)
    for leaf, (start, end) in enumerate(itertools.pairwise(leaf_offsets)):
        at = start + np.flatnonzero(response_mask[start:end])
        ids = tokens[at].tolist()
        prompt = tokenizer.decode(tokens[start : at[0] if len(at) else end])
        samples.append(
            Sample(f"uid {uid[leaf]}", prompt, tokenizer.decode(ids), ids, unpack(ground_truth[leaf]))
        )
        if len(at):
            last_L[leaf] = at[-1]
    given = score_now(function, samples, arguments)
    scored_L = np.array([s is not None for s in given], np.bool_)
    score_L = np.array([0.0 if s is None else s for s in given], np.float32)
    rewards_T = np.zeros(len(tokens), np.float32)
    carried_L = last_L >= 0
    rewards_T[last_L[carried_L]] = score_L[carried_L]
    metrics = {"scored": float(scored_L.mean())} if len(given) else {}
    if scored_L.any():
        metrics["reward"] = float(score_L[scored_L].mean(dtype=np.float64))
    return Scored(score_L, scored_L, rewards_T, metrics)


# --- reward functions ------------------------------------------------------------------------


def exact(completion: str, ground_truth: Any) -> float | None:
    """1 when the answer is the ground truth to the letter, else 0; None without a ground truth."""
    if ground_truth is None:
        return None
    truth = str(ground_truth).strip()
    return float(answer_of(completion, truth) == truth)


def reasoning_gym(
    completion: str, ground_truth: Any, *, task: str, metadata: Any, options: dict[str, Any] | None = None
) -> float:
    """The score in [0, 1] of the task's own scorer; many give a part of it for what is partly right.

    An answer between <answer> tags is taken from there, which is how reasoning-gym asks for it in chats.
    """
    entry = {"answer": ground_truth, "metadata": _tuples(metadata) if task in _WANT_TUPLES else metadata}
    from hops.rows.gym import scorer

    if "<answer>" in completion and "</answer>" in completion:
        answer = completion.rpartition("</answer>")[0].rpartition("<answer>")[2].strip()
    else:
        answer = answer_of(completion, ground_truth)
    try:
        return float(scorer(task, options or {})(answer, entry))
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError, RecursionError):
        # some scorers raise on text of a form that they do not expect, e.g. int("seven"): it is wrong
        return 0.0


def printable(completion: str, ground_truth: Any) -> float:
    """The share of its characters that are printable ASCII; 0 for none. Even a model of random weights gets some."""
    return sum(" " <= character <= "~" for character in completion) / max(1, len(completion))


def answer_of(completion: str, ground_truth: Any) -> str:
    """The completion up to its first newline, stripped; all of it when the ground truth has several lines.

    After few-shot text a model that is not stopped goes on with the next question: what follows is no answer.
    """
    several = not isinstance(ground_truth, str) or "\n" in ground_truth.strip()
    return (completion if several else completion.partition("\n")[0]).strip()


# These compare their metadata with tuples, which JSON turned into lists.
_WANT_TUPLES = ("arc_agi", "rearc")


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
