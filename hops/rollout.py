"""Rollout: a request becomes a trajectory, of one response or of an episode, returned the moment it ends."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from flowgraph import (
    Array,
    Backlog,
    Below,
    Dim,
    Engine,
    EngineLoad,
    Generation,
    Json,
    LastToken,
    Latest,
    Mask,
    Rejected,
    Sampling,
    Scalars,
    Shared,
    Tokenizer,
    effect,
    outputs,
)
from hops import turns
from hops.environments.protocol import check_environment
from hops.episode import Turns, judged, play
from hops.rows.example import unpack

T = TypeVar("T")


class Trajectory(NamedTuple):
    """One trajectory of one leaf: the prompt's tokens, then the sampled ones.

    logprobs and versions are those of the sampled tokens (0 and -1 on the prompt); response_mask marks them.
    backlog: requests that the engine had then and could not compute; one more when it had dropped this one's KV
    to make room
    """

    tokens: Annotated[Int32[Array, "token"], Below("vocab")]
    logprobs: Float32[Array, "token"]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    versions: Int32[Array, "token"]
    leaf_offsets: Annotated[Int64[Array, "leaf+1"], Below("token+1")]
    metrics: Annotated[dict[str, float], Scalars()]
    backlog: Annotated[Backlog, Latest()]


def validate(
    *, temperature: float = 1.0, stop: list[str] | None = None, time_limit: float | None = None
) -> None:
    Sampling(max_new_tokens=1, temperature=temperature, stop=tuple(stop or ()))
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise ValueError(f"time_limit must be a positive number of seconds, not {time_limit}")
    if temperature == 0:
        raise ValueError(
            "temperature 0 samples the same response every time, so a group has nothing to compare"
        )


@effect(uses=Engine, owner="rollout", lifetime="consumed", maps="trajectory", validate=validate)
async def complete(
    prompt: Int32[Array, "prompt"],
    key: UInt64[Array, ""],
    *,
    engine: Engine,
    max_new_tokens: Annotated[int, Dim("response")],
    temperature: float = 1.0,
    stop: list[str] | None = None,
    time_limit: float | None = None,
) -> Trajectory:
    """Sample one response to one prompt. prompt: i32[prompt]; key: u64, the request's own randomness.

    time_limit: seconds after which it is given up, and dropped (reason "time limit"); its slot is free then.

    The bound of `dims.response` is the longest response. metrics: `length` in tokens; `truncated`, 1 when the bound or
    the model's context ended it (the finish reason decides, not the length); `retractions`, how often its KV was
    dropped; `engine_running`, `engine_waiting` and `engine_kv_used`, the engine's load when it ended.
    """
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, stop=tuple(stop or ()))
    out = await sample(prompt, key, engine, sampling, time_limit)
    place = outputs(complete, token=len(prompt) + len(out.ids), leaf=1)
    return Trajectory(**trajectory(prompt, out, engine, place), **place)


async def sample(
    prompt: np.ndarray[Any, Any],
    key: np.ndarray[Any, Any],
    engine: Engine,
    sampling: Sampling,
    time_limit: float | None,
) -> Generation:
    """One response to one prompt. Raises Rejected("time limit") when it takes longer."""
    return await within(time_limit, engine.generate(prompt, sampling, key=int(key), rid=uuid.uuid4().hex))


async def within(seconds: float | None, what: Awaitable[T]) -> T:
    """What a trajectory waits for. Raises Rejected("time limit") when it takes longer."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            return await what
    except TimeoutError:
        if scope.expired():
            raise Rejected("time limit") from None
        raise


def trajectory(
    prompt: np.ndarray[Any, Any], out: Generation, engine: Engine, place: dict[str, Any]
) -> dict[str, Any]:
    """Write a prompt and one response to it as the arrays of `Trajectory`; its other fields.

    place: the arrays, as `outputs` gives them. Raises ValueError for a response whose parts do not fit each other.
    """
    p, r = len(prompt), len(out.ids)
    if not len(out.logprobs) == len(out.versions) == r:
        raise ValueError(
            f"the engine gave {r} ids, {len(out.logprobs)} log-probabilities, {len(out.versions)} versions"
        )
    place["tokens"][:p], place["tokens"][p:] = prompt, out.ids
    place["logprobs"][:p], place["logprobs"][p:] = 0, out.logprobs
    place["response_mask"][:p], place["response_mask"][p:] = False, True
    place["versions"][:p], place["versions"][p:] = -1, out.versions
    place["leaf_offsets"][:] = 0, p + r
    load = engine.load()
    metrics = {
        "length": r,
        "truncated": out.finish_reason in ("length", "context"),
        "retractions": out.retractions,
        **_told(load),
    }
    return {
        "metrics": {name: float(value) for name, value in metrics.items()},
        "backlog": Backlog(load.backlog + out.pressed),
    }


def _told(load: EngineLoad) -> dict[str, float]:
    """An engine's load, as metrics."""
    return {
        "engine_running": load.running,
        "engine_waiting": load.waiting,
        "engine_kv_used": load.kv_used,
    }


# --- episodes ------------------------------------------------------------------------------------------------------


class Episode(NamedTuple):
    """One trajectory with its leaves, packed one behind the other at leaf_offsets; see `hops.turns`.

    logprobs, versions: of sampled tokens, in every leaf that has them (0 and -1 elsewhere)
    response_mask: marks each sampled token in the first leaf that has it
    sampled: the number of the token among those that the trajectory sampled, in every leaf; -1 of prompts and
    observations
    score, scored: the environment's reward, the same for every leaf; 0 where scored is false
    token_level_rewards: the reward, once: on the token that was sampled last
    """

    tokens: Annotated[Int32[Array, "token"], Below("vocab"), Shared("leaf")]
    logprobs: Annotated[Float32[Array, "token"], Shared("leaf")]
    response_mask: Annotated[Bool[Array, "token"], Mask()]
    versions: Annotated[Int32[Array, "token"], Shared("leaf")]
    leaf_offsets: Annotated[Int64[Array, "leaf+1"], Below("token+1")]
    sampled: Annotated[Int32[Array, "token"], Shared("leaf")]
    score: Float32[Array, "leaf"]
    scored: Bool[Array, "leaf"]
    token_level_rewards: Annotated[Float32[Array, "token"], LastToken("leaf")]
    metrics: Annotated[dict[str, float], Scalars()]
    backlog: Annotated[Backlog, Latest()]


def _validate_episode(
    *,
    environment: Callable[..., Any],
    max_turns: int = 8,
    temperature: float = 1.0,
    stop: list[str] | None = None,
    time_limit: float = 300.0,
) -> None:
    check_environment(environment)
    validate(temperature=temperature, stop=stop, time_limit=time_limit)
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, not {max_turns}")


@effect(uses=Engine, owner="rollout", lifetime="consumed", maps="trajectory", validate=_validate_episode)
async def episode(
    prompt: Int32[Array, "prompt"],
    ground_truth: Annotated[Any, Json()],
    key: UInt64[Array, ""],
    *,
    engine: Engine,
    tokenizer: Tokenizer,
    budget: Annotated[int, Dim("response")],
    longest: Annotated[int, Dim("prompt")],
    leaves: Annotated[int, Dim("leaf")] = 1,
    environment: Callable[..., Any],
    max_turns: int = 8,
    temperature: float = 1.0,
    stop: list[str] | None = None,
    time_limit: float = 300.0,
) -> Episode:
    """Let an environment play one episode; see `hops.environments.protocol`.

    prompt: i32[prompt]; ground_truth: what `hops.rows.pack` made of the row; key: u64, the request's own randomness.
    The bound of `dims.response` is the most that is sampled over all turns; a leaf has at most the bounds of
    `dims.prompt` and `dims.response` together, observations included; `dims.leaf` bounds the leaves.

    environment: `async (example, generate) → reward`
    max_turns: calls of the model; time_limit: seconds of the whole episode, less than `run.deadline`
    metrics: `turns`, `leaves`, `forks`, `length` (tokens sampled), `truncated` (1 when a bound ended a turn or kept one
    from being asked), those of `complete`, `reward` where there is one, and the environment's own.
    Raises Rejected for an environment that raises ("environment error") or is late ("time limit"); ValueError for an
    episode of more leaves than `dims.leaf`, or a reward that is no finite number.
    """
    example = unpack(ground_truth)
    if isinstance(example.prompt, str):
        text = tokenizer.decode(prompt, skip_special=False)
        example = example._replace(prompt=text)
    else:
        text = tokenizer.chat(example.prompt)
    model = Turns(
        engine,
        tokenizer,
        turns.root(text, prompt),
        key=int(key),
        budget=budget,
        context=longest + budget,
        max_turns=max_turns,
        leaves=leaves,
        temperature=temperature,
        stop=tuple(stop or ()),
    )
    score, numbers = judged(environment, await play(environment, example, model, time_limit))
    flat = turns.flatten(model.tree)
    count, load = len(flat.leaf_offsets) - 1, engine.load()
    rewards = np.zeros(len(flat.tokens), np.float32)
    if score is not None and model.tree.sampled:
        rewards[np.flatnonzero(flat.mask & (flat.sampled == model.tree.sampled - 1))] = score
    metrics = {
        **numbers,  # the environment's own never hide those of the episode
        "turns": model.turns,
        "leaves": count,
        "forks": count - 1,
        "length": model.tree.sampled,
        "truncated": model.truncated,
        "retractions": model.retractions,
        **_told(load),
        **({} if score is None else {"reward": score}),
    }
    return Episode(
        tokens=flat.tokens,
        logprobs=flat.logprobs,
        response_mask=flat.mask,
        versions=flat.versions,
        leaf_offsets=flat.leaf_offsets,
        sampled=flat.sampled,
        score=np.full(count, 0.0 if score is None else score, np.float32),
        scored=np.full(count, score is not None),
        token_level_rewards=rewards,
        metrics={name: float(value) for name, value in metrics.items()},
        backlog=Backlog(load.backlog + bool(model.pressed)),
    )
