"""Hidden state: what a function that calls itself pure keeps from one firing to the next, read off its code."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np

MUTABLE = (list, dict, set, bytearray, np.ndarray)
WRITES_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
WRITES_OUTER = ("STORE_DEREF", "DELETE_DEREF")


def hidden(function: Callable[..., Any]) -> dict[str, str]:
    """Variable → how the function keeps it, e.g. `writes the global SEEN`. Decorators are looked through.

    A helper that caches what it computes (functools.lru_cache) is not followed: it changes no result.
    """
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return {}
    found = {name: f"writes the {scope} {name}" for scope, name in _written(inner.__code__)}
    for name, value in _defaults(inner):
        if isinstance(value, MUTABLE):
            found.setdefault(
                name, f"has a {type(value).__name__} as the default of {name}, made once for all firings"
            )
    for name, value in _enclosed(inner):
        if isinstance(value, MUTABLE):
            found.setdefault(name, f"closes over {name}, a {type(value).__name__} that outlives a firing")
    return found


def method_of(function: Callable[..., Any]) -> str:
    """The class of the object that a function is a method of, "" for none: such an object outlives a firing."""
    inner = inspect.unwrap(function, stop=inspect.ismethod)
    owner = inner.__self__ if inspect.ismethod(inner) else None
    return "" if owner is None or isinstance(owner, type) else type(owner).__name__


def _written(code: CodeType) -> Iterator[tuple[str, str]]:
    """(scope, name) of every variable that is not the function's own and that it, or a function in it, writes."""
    outer = set(code.co_freevars)
    codes = [code]
    for at in codes:
        codes += [const for const in at.co_consts if isinstance(const, CodeType)]
        for step in dis.get_instructions(at):
            if step.opname in WRITES_GLOBAL:
                yield "global", step.argval
            elif step.opname in WRITES_OUTER and step.argval in outer and step.argval in at.co_freevars:
                yield "enclosing variable", step.argval


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for parameter in inspect.signature(function).parameters.values():
        yield parameter.name, parameter.default


def _enclosed(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet, so nothing is kept in it
            continue
