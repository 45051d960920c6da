"""Reward functions as people have them: TRL's, verl's and the plain two-argument one, told by parameters.

| who | parameters, given by name | gives |
|---|---|---|
| plain | completion, ground_truth, any other column | float or None |
| verl | data_source, solution_str, ground_truth, extra_info | float, or a dict with "score" |
| TRL | prompts, completions, completion_ids, every column as a list | a list of float or None |

Any of them may be `async def`. Sources: https://huggingface.co/docs/trl/grpo_trainer ("Using a custom reward
function"), https://verl.readthedocs.io/en/latest/preparation/reward_function.html.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from hops.rows.example import near

Style = Literal["plain", "verl", "TRL"]
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_ONLY_TRL = ("trainer_state", "environments")


def style_of(function: Callable[..., Any]) -> Style:
    """Which of the three signatures `function` has. Raises ValueError listing them when it is none."""
    parameters = parameters_of(function)
    if {"prompts", "completions", "completion_ids"} & parameters.keys():
        return "TRL"
    if "solution_str" in parameters:
        return "verl"
    if "completion" in parameters:
        return "plain"
    raise ValueError(
        f"reward function {name_of(function)}({', '.join(parameters)}) has no known signature: "
        "(completion, ground_truth) → float | None; "
        "verl's (data_source, solution_str, ground_truth, extra_info) → float | dict; "
        "TRL's (prompts, completions, completion_ids, **columns) → list. Rename its parameters to one of them"
    )


def check_function(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError for a function that can't be called, as far as that shows before there are rows.

    arguments: further keyword arguments from the graph (verl's `reward_kwargs`)
    """
    style, name, parameters, given = (
        style_of(function),
        name_of(function),
        parameters_of(function),
        arguments or {},
    )
    for key in given:
        if not takes(parameters, key):
            raise ValueError(
                f"reward function {name} takes no {key!r}; {near(key, parameters)}mend arguments:"
            )
    for key, parameter in parameters.items():
        never = (style == "verl" and key not in _VERL) or (style == "TRL" and key in _ONLY_TRL)
        if never and required(parameter) and key not in given:
            raise ValueError(
                f"reward function {name} needs {key!r}, which nothing gives; give it under arguments:"
            )


def name_of(function: Callable[..., Any]) -> str:
    """module.name, as a graph file would write it."""
    named = function if hasattr(function, "__qualname__") else getattr(function, "func", type(function))
    return f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise ValueError(
            f"reward function {function!r} shows no signature; wrap it in a Python function"
        ) from None


def takes(parameters: dict[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def required(parameter: inspect.Parameter) -> bool:
    many = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in many
