"""Evaluation: the score on fixed held-out prompts, once a version."""

from __future__ import annotations

import asyncio
import hashlib
import math
import uuid
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from flowgraph import Dim, Engine, Event, RunError, Sampling, Scalars, Tokenizer, Version, effect
from hops.rows.example import Example, prompt_ids
from hops.scoring import Sample, score_async
from hops.signature import check_function


class Evaluated(NamedTuple):
    """metrics

    score: the mean over prompts of the mean over a prompt's samples
    stderr: the standard error of `score` over prompts (n − 1)
    scored: the share of samples that the reward function scored; the others are left out
    version: the version asked for; off_version: the share of samples with a token from another one
    """

    metrics: Annotated[dict[str, float], Scalars()]


def _check(
    *,
    rows: Callable[..., Any],
    function: Callable[..., Any],
    arguments: dict[str, Any] | None = None,
    prompts: int = 64,
    samples: int = 4,
    temperature: float = 1.0,
    stop: list[str] | None = None,
) -> None:
    check_function(function, arguments)
    for name, value in (("prompts", prompts), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if temperature == 0 and samples > 1:
        raise ValueError(f"at temperature 0 all {samples} samples of a prompt are equal; set samples: 1")
    Sampling(1, temperature, tuple(stop or ()))


@effect(uses=Engine, owner="rollout", validate=_check)
async def held_out(
    version: Annotated[Version, Event()],
    *,
    engine: Engine,
    tokenizer: Tokenizer,
    rows: Callable[..., Any],
    function: Callable[..., Any],
    arguments: dict[str, Any] | None = None,
    prompts: int = 64,
    samples: int = 4,
    max_new_tokens: Annotated[int, Dim("response")],
    temperature: float = 1.0,
    stop: list[str] | None = None,
) -> Evaluated:
    """Sample each of the first `prompts` rows `samples` times and score them as `hops.reward.score` does.

    rows: index → `hops.rows.Example`, e.g. {use: hops.rows.table, path: test.jsonl}
    A response is at most `dims.response` tokens long, as in training. The random key of a sample depends on
    its prompt's index and its own, so that all versions draw alike.
    Raises ValueError when there are fewer rows than prompts, RunError when the engine ends a request early.
    """
    sampling = Sampling(max_new_tokens, temperature, tuple(stop or ()))
    examples = _examples(rows, prompts)
    jobs = [(i, s, uuid.uuid4().hex) for i in range(prompts) for s in range(samples)]
    ids = [prompt_ids(example, tokenizer, f"held-out row {i}") for i, example in enumerate(examples)]
    try:
        made = await asyncio.gather(
            *(engine.generate(ids[i], sampling, key=sample_key(i, s), rid=rid) for i, s, rid in jobs)
        )
    except BaseException:
        for _, _, rid in jobs:
            engine.abort(rid)
        raise
    drawn = []
    for (i, s, _), generation in zip(jobs, made, strict=True):
        if generation.finish_reason == "abort":
            raise RunError(
                f"the engine ended sample {s} of held-out row {i} early", "see why the engine aborted it"
            )
        where, written = f"held-out row {i}, sample {s}", generation.ids.tolist()
        text = tokenizer.decode(written)
        drawn.append(Sample(where, tokenizer.decode(ids[i].tolist()), text, written, examples[i]))
    scores = await score_async(function, drawn, arguments)
    metrics = summary(np.array([math.nan if s is None else s for s in scores]).reshape(prompts, samples))
    off = float(np.mean([(g.versions != version).any() for g in made]))
    return Evaluated({**metrics, "version": float(version), "off_version": off})


def sample_key(prompt: int, sample: int) -> int:
    """The 64-bit random key of one sample, the same in every run and version."""
    return int.from_bytes(hashlib.blake2b(f"held_out/{prompt}/{sample}".encode(), digest_size=8).digest())


def summary(scores_PS: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """score, stderr and scored of f64[prompt, sample], NaN where there is no score; the unknown is out."""
    known_PS = ~np.isnan(scores_PS)
    counts_P = known_PS.sum(1)
    mean_P = np.where(known_PS, scores_PS, 0).sum(1)[counts_P > 0] / counts_P[counts_P > 0]
    found = {"scored": float(known_PS.mean())}
    if len(mean_P):
        found["score"] = float(mean_P.mean())
    if len(mean_P) > 1:
        found["stderr"] = float(mean_P.std(ddof=1) / math.sqrt(len(mean_P)))
    return found


def _examples(rows: Callable[..., Any], count: int) -> list[Example]:
    examples: list[Example] = []
    for index in range(count):
        try:
            examples.append(rows(index))
        except IndexError as error:
            raise ValueError(
                f"prompts: {count}, but there are only {index} held-out rows ({error})"
            ) from error
    return examples
