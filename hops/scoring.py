"""Reward functions as people have them: TRL's, verl's and the plain two-argument one, told apart by their parameters.

| who | parameters, given by name | gives |
|---|---|---|
| plain | completion, ground_truth, any other column | float or None |
| verl | data_source, solution_str, ground_truth, extra_info | float, or a dict with "score" |
| TRL | prompts, completions, completion_ids, every column as a list | a list of float or None |

Any of them may be `async def`. Sources: https://huggingface.co/docs/trl/grpo_trainer ("Using a custom reward
function"), https://verl.readthedocs.io/en/latest/preparation/reward_function.html.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np

from hops.rows.example import Example, near

Style = Literal["plain", "verl", "TRL"]
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL = ("prompts", "completions", "completion_ids")
_ONLY_TRL = ("trainer_state", "environments")


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


def style_of(function: Callable[..., Any], arguments: dict[str, Any] | None = None) -> Style:
    """Which of the three signatures `function` has. Raises ValueError when it is none, or needs what nothing gives.

    arguments: further keyword arguments from the graph (verl's `reward_kwargs`)
    """
    name, parameters = name_of(function), _parameters(function)
    style: Style
    if {"prompts", "completions", "completion_ids"} & parameters.keys():
        style = "TRL"
    elif "solution_str" in parameters:
        style = "verl"
    elif "completion" in parameters:
        style = "plain"
    else:
        raise ValueError(
            f"reward function {name}({', '.join(parameters)}) has none of the signatures known here: "
            "(completion, ground_truth) → float | None; "
            "verl's (data_source, solution_str, ground_truth, extra_info) → float | dict; "
            "TRL's (prompts, completions, completion_ids, **columns) → list. Rename its parameters to one of them"
        )
    given = arguments or {}
    for key in given:
        if not _takes(parameters, key):
            raise ValueError(f"reward function {name} takes no {key!r}; {near(key, parameters)}mend arguments:")
    for key, parameter in parameters.items():
        unknown = style == "verl" and key not in _VERL or style == "TRL" and key in _ONLY_TRL
        if unknown and _required(parameter) and key not in given:
            raise ValueError(f"reward function {name} needs {key!r}, which nothing gives; give it under arguments:")
    return style


def score_now(function: Callable[..., Any], samples: Sequence[Sample], **arguments: Any) -> list[float | None]:
    """The score of every sample; None where the function gave none.

    Raises ValueError naming function, sample and completion when the function raises, or gives something that is
    no finite number. Works inside and outside a running event loop.
    """
    calls = _calls(function, samples, arguments)
    results = [_start(function, call) for call in calls]
    # a plain function stays in this very thread: math-verify and others use signals, which only the main one gets
    if any(inspect.isawaitable(result) for result in results):
        results = _run(lambda: _settle(function, calls, results))
    return _scores(function, calls, results)


async def score_async(
    function: Callable[..., Any], samples: Sequence[Sample], **arguments: Any
) -> list[float | None]:
    """`score_now` for callers that are coroutines themselves."""
    calls = _calls(function, samples, arguments)
    results = [_start(function, call) for call in calls]
    return _scores(function, calls, await _settle(function, calls, results))


# --- before the call -------------------------------------------------------------------------------------------


def _calls(function: Callable[..., Any], samples: Sequence[Sample], arguments: dict[str, Any]) -> list[_Call]:
    style, parameters = style_of(function, arguments), _parameters(function)
    if not samples:
        return []
    made = {"plain": _plain, "verl": _verl}
    calls = [_trl(samples)] if style == "TRL" else [made[style](sample) for sample in samples]
    chosen = []
    for call in calls:
        given = {k: v for k, v in {**call.arguments, **arguments}.items() if _takes(parameters, k)}
        for key, parameter in parameters.items():
            if _required(parameter) and key not in given:
                raise ValueError(
                    f"reward function {name_of(function)} needs {key!r}, which the rows do not have; "
                    f"{near(key, call.arguments)}they give {', '.join(call.arguments)}"
                )
        chosen.append(_Call(given, call.samples))
    return chosen


def _plain(sample: Sample) -> _Call:
    example = sample.example
    columns = {**example.columns, example.name: example.ground_truth}
    return _Call({**columns, "completion": sample.completion, "ground_truth": example.ground_truth}, [sample])


def _verl(sample: Sample) -> _Call:
    example = sample.example
    return _Call(
        {
            "data_source": example.columns.get("data_source", ""),
            "solution_str": sample.completion,
            "ground_truth": example.ground_truth,
            "extra_info": example.columns.get("extra_info", example.columns),
        },
        [sample],
    )


def _trl(samples: Sequence[Sample]) -> _Call:
    """All samples at once. Chats go as TRL has them: the prompt's messages, and one assistant message a completion."""
    columns = [{**s.example.columns, s.example.name: s.example.ground_truth} for s in samples]
    names = dict.fromkeys(name for row in columns for name in row)
    arguments: dict[str, Any] = {name: [row.get(name) for row in columns] for name in names}
    arguments["ground_truth"] = [s.example.ground_truth for s in samples]
    chats = [not isinstance(s.example.prompt, str) for s in samples]
    arguments["prompts"] = [s.example.prompt if chat else s.prompt for s, chat in zip(samples, chats, strict=True)]
    arguments["completions"] = [
        [{"role": "assistant", "content": s.completion}] if chat else s.completion
        for s, chat in zip(samples, chats, strict=True)
    ]
    arguments["completion_ids"] = [s.completion_ids for s in samples]
    arguments["log_extra"] = arguments["log_metric"] = lambda *_: None
    return _Call(arguments, samples)


# --- the call, and after ------------------------------------------------------------------------------------------


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


def _run(make: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return await make()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, main()).result()


def _scores(function: Callable[..., Any], calls: list[_Call], results: list[Any]) -> list[float | None]:
    trl = bool(calls) and style_of(function) == "TRL"
    scores: list[float | None] = []
    for call, result in zip(calls, results, strict=True):
        values = list(result) if trl and hasattr(result, "__iter__") else [result]
        if len(values) != len(call.samples):
            raise ValueError(
                f"reward function {name_of(function)} gave {len(values)} scores for {len(call.samples)} completions; "
                "it must give a list with one entry a completion"
            )
        scores += [_number(function, s, v) for s, v in zip(call.samples, values, strict=True)]
    return scores


def _number(function: Callable[..., Any], sample: Sample, value: Any) -> float | None:
    if isinstance(value, dict):
        value = value.get("score", value)
    if value is None:
        return None
    try:
        # as the float32 that the seam carries
        number = float(np.float32(min(max(float(value), -1e300), 1e300))) if not _nan(value) else math.nan
    except (TypeError, ValueError):
        raise ValueError(
            f"reward function {name_of(function)} gave {value!r:.80} for {sample.where}, completion "
            f"{sample.completion!r:.200}; it must give a number, or None for no score"
        ) from None
    if not math.isfinite(number):
        raise ValueError(
            f"reward function {name_of(function)} gave {value!r:.80} for {sample.where}, completion "
            f"{sample.completion!r:.200}; it must give a finite float32, or None for no score"
        )
    return number


def _nan(value: Any) -> bool:
    return math.isnan(float(value))


def _raised(function: Callable[..., Any], call: _Call, error: Exception) -> ValueError:
    first, more = call.samples[0], len(call.samples) - 1
    others = f" (and {more} others in the same call)" if more else ""
    return ValueError(
        f"reward function {name_of(function)} raised {type(error).__name__}: {error} for {first.where}, completion "
        f"{first.completion!r:.200}{others}; mend it, or return None for what it can't score"
    )


def name_of(function: Callable[..., Any]) -> str:
    """module.name, as a graph file would write it."""
    named = function if hasattr(function, "__qualname__") else getattr(function, "func", type(function))
    return f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise ValueError(f"reward function {function!r} shows no signature; wrap it in a Python function") from None


def _takes(parameters: dict[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _required(parameter: inspect.Parameter) -> bool:
    many = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in many
