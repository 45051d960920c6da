"""Calling a reward function, whichever of the known signatures it has, and reading what it gives."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from hops.rows.example import Example, near
from hops.signature import name_of, parameters_of, required, style_of, takes


class Sample(NamedTuple):
    """One completion to score.

    where: how an error names it, e.g. "uid 7"
    prompt, completion: decoded text; completion_ids: its token ids
    example: ground truth and columns, and the messages of a chat prompt
    """

    where: str
    prompt: str
    completion: str
    completion_ids: list[int]
    example: Example


class _Call(NamedTuple):
    """The keyword arguments of one call of the reward function, and the samples that it scores."""

    arguments: dict[str, Any]
    samples: Sequence[Sample]


def score_now(
    function: Callable[..., Any], samples: Sequence[Sample], arguments: Mapping[str, Any] | None = None
) -> list[float | None]:
    """The score of every sample; None where the function gave none.

    Raises ValueError naming function, sample and completion when it raises or gives no finite number.
    Works inside and outside a running event loop.
    """
    calls = _calls(function, samples, arguments or {})
    results = [_start(function, call) for call in calls]
    # what is not async stays in this thread: math-verify uses signals, which only the main one has
    if any(inspect.isawaitable(result) for result in results):
        results = _run(_settle(function, calls, results))
    return _scores(function, calls, results)


async def score_async(
    function: Callable[..., Any], samples: Sequence[Sample], arguments: Mapping[str, Any] | None = None
) -> list[float | None]:
    """`score_now` for callers that are coroutines themselves."""
    calls = _calls(function, samples, arguments or {})
    results = [_start(function, call) for call in calls]
    return _scores(function, calls, await _settle(function, calls, results))


# --- before the call ------------------------------------------------------------------------


def _calls(
    function: Callable[..., Any], samples: Sequence[Sample], arguments: Mapping[str, Any]
) -> list[_Call]:
    style, parameters = style_of(function), parameters_of(function)
    if not samples:
        return []
    one = _verl if style == "verl" else _plain
    calls = [_trl(samples)] if style == "TRL" else [one(sample) for sample in samples]
    chosen = []
    for call in calls:
        given = {k: v for k, v in {**call.arguments, **arguments}.items() if takes(parameters, k)}
        for key, parameter in parameters.items():
            if required(parameter) and key not in given:
                raise ValueError(
                    f"reward function {name_of(function)} needs {key!r}, which the rows do not have; "
                    f"{near(key, call.arguments)}they give {', '.join(call.arguments)}"
                )
        chosen.append(_Call(given, call.samples))
    return chosen


def _plain(sample: Sample) -> _Call:
    example = sample.example
    columns = {**example.columns, example.name: example.ground_truth}
    asked = {"prompt": example.prompt or sample.prompt, "completion": sample.completion}
    return _Call({**columns, **asked, "ground_truth": example.ground_truth}, [sample])


def _verl(sample: Sample) -> _Call:
    example = sample.example
    return _Call(
        {
            "data_source": example.columns.get("data_source", ""),
            "solution_str": sample.completion,
            "ground_truth": example.ground_truth,
            "extra_info": example.columns.get("extra_info") or example.columns,
        },
        [sample],
    )


def _trl(samples: Sequence[Sample]) -> _Call:
    """All samples at once. Chats go as in TRL: a list of messages each."""
    columns = [{**s.example.columns, s.example.name: s.example.ground_truth} for s in samples]
    names = dict.fromkeys(name for row in columns for name in row)
    arguments: dict[str, Any] = {name: [row.get(name) for row in columns] for name in names}
    arguments["ground_truth"] = [s.example.ground_truth for s in samples]
    chats = [not isinstance(s.example.prompt, str) for s in samples]
    arguments["prompts"] = [
        s.example.prompt if chat else s.prompt for s, chat in zip(samples, chats, strict=True)
    ]
    arguments["completions"] = [
        [{"role": "assistant", "content": s.completion}] if chat else s.completion
        for s, chat in zip(samples, chats, strict=True)
    ]
    arguments["completion_ids"] = [s.completion_ids for s in samples]
    arguments["log_extra"] = arguments["log_metric"] = lambda *_: None
    return _Call(arguments, samples)


# --- the call, and after ------------------------------------------------------------------------


def _start(function: Callable[..., Any], call: _Call) -> Any:
    try:
        return function(**call.arguments)
    except Exception as error:
        raise _raised(function, call, error) from error


async def _settle(function: Callable[..., Any], calls: list[_Call], results: list[Any]) -> list[Any]:
    async def wait(call: _Call, result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise _raised(function, call, error) from error

    return list(await asyncio.gather(*(wait(c, r) for c, r in zip(calls, results, strict=True))))


def _run(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _scores(function: Callable[..., Any], calls: list[_Call], results: list[Any]) -> list[float | None]:
    scores: list[float | None] = []
    for call, result in zip(calls, results, strict=True):
        values = [result]
        if style_of(function) == "TRL":
            values = list(result) if hasattr(result, "__iter__") else []
            if len(values) != len(call.samples):
                raise ValueError(
                    f"reward function {name_of(function)} gave {len(values) or repr(result)} scores for "
                    f"{len(call.samples)} completions; it must give a list with one entry a completion"
                )
        scores += [_number(function, s, v) for s, v in zip(call.samples, values, strict=True)]
    return scores


def _number(function: Callable[..., Any], sample: Sample, value: Any) -> float | None:
    """The score as the float32 that crosses the seam."""
    if isinstance(value, dict):
        value = value.get("score", value)
    if value is None:
        return None
    number = as_float32(value)
    if not math.isfinite(number):
        raise ValueError(
            f"reward function {name_of(function)} gave {value!r:.80} for {sample.where}, completion "
            f"{sample.completion!r:.200}; it must give a finite float32, or None for no score"
        )
    return number


def as_float32(value: Any) -> float:
    """A number as the float32 that crosses a seam, an infinity where it is too large; NaN for what is no number."""
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(float(value)))
    except (TypeError, ValueError):
        return math.nan


def _raised(function: Callable[..., Any], call: _Call, error: Exception) -> ValueError:
    first, more = call.samples[0], len(call.samples) - 1
    others = f" (and {more} others in the same call)" if more else ""
    return ValueError(
        f"reward function {name_of(function)} raised {type(error).__name__}: {error} for {first.where}, "
        f"completion {first.completion!r:.200}{others}; mend it, or return None for what it can't score"
    )
