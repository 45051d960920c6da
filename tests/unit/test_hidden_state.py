"""What a function keeps between firings is read off its code, and what it does not keep is left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flowgraph.spec.hidden import hidden

COUNT = 0
TABLE = {"a": 1}


def writes_a_global(x: int) -> int:
    global COUNT
    COUNT += x
    return COUNT


def writes_in_an_inner_function(x: int) -> int:
    def inner() -> int:
        global COUNT
        COUNT = x
        return x

    return inner()


def deletes_a_global() -> None:
    global COUNT
    del COUNT


def counter() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


def through_an_inner_function() -> Callable[[], None]:
    n = 0

    def outer() -> None:
        def inner() -> None:
            nonlocal n
            n += 1

        inner()

    return outer


def closes_over(value: Any) -> Callable[[], Any]:
    return lambda: value


def with_default(value: Any) -> Callable[..., Any]:
    def f(x: Any = value, *, y: Any = value) -> Any:
        return x, y

    return f


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@functools.lru_cache
def cached(x: int) -> int:
    return x


def clean(x: int, y: tuple[int, ...] = (), z: str | None = None) -> int:
    """It reads a module's table, uses a cached helper, and writes variables of its own, also from an inner function."""
    total = TABLE["a"]

    def add(n: int) -> None:
        nonlocal total
        total += cached(n)

    for n in [x, *y]:
        add(n)
    return total


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (writes_a_global, {"COUNT": "writes the global COUNT"}),
        (writes_in_an_inner_function, {"COUNT": "writes the global COUNT"}),
        (deletes_a_global, {"COUNT": "writes the global COUNT"}),
        (counter(), {"n": "writes the enclosing variable n"}),
        (through_an_inner_function(), {"n": "writes the enclosing variable n"}),
        (closes_over([]), {"value": "closes over value, a list that outlives a firing"}),
        (closes_over(np.zeros(2)), {"value": "closes over value, a ndarray that outlives a firing"}),
        (with_default({}), dict.fromkeys("xy", "dict")),
        (wrapped(writes_a_global), {"COUNT": "writes the global COUNT"}),
        (functools.lru_cache(writes_a_global), {"COUNT": "writes the global COUNT"}),
    ],
)
def test_what_is_kept_is_named(function: Callable[..., Any], kept: dict[str, str]) -> None:
    found = hidden(function)
    assert found.keys() == kept.keys()
    assert all(kept[name] in how for name, how in found.items())


@pytest.mark.parametrize("function", [clean, wrapped(clean), closes_over(3), closes_over((1,)), cached, len])
def test_what_is_pure_keeps_nothing(function: Callable[..., Any]) -> None:
    assert hidden(function) == {}
