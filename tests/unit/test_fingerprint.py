"""A fingerprint is that of the content, and looking at a value neither changes it nor raises."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import random
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.runtime.fingerprint import LARGEST, fingerprint

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


class Struct(msgspec.Struct):
    a: Any = 0


@dataclass
class Plain:
    a: Any = 0
    b: list[int] = field(default_factory=list)


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a


class Shy:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("do not look")


def advanced(n: int) -> Any:
    count = itertools.count()
    for _ in range(n):
        next(count)
    return count


def drawn(generator: Any, n: int) -> Any:
    for _ in range(n):
        generator.random()
    return generator


@given(PLAIN)
def test_equal_values_have_equal_fingerprints(value: Any) -> None:
    before = copy.deepcopy(value)
    assert fingerprint(value) == fingerprint(before)
    assert repr(value) == repr(before)
    assert fingerprint([value]) != fingerprint(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ("a", b"a"),
        (10**5000, 10**5000 + 1),
        (["ab"], ["a", "b"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, {1, 3}),
        (deque([1]), deque([2])),
        (OrderedDict(a=1), OrderedDict(a=2)),
        (Struct([1]), Struct([2])),
        (Plain(b=[1]), Plain(b=[2])),
        (Slots(1), Slots(2)),
        (advanced(1), advanced(2)),
        (drawn(random.Random(0), 1), drawn(random.Random(0), 2)),
        (drawn(np.random.default_rng(0), 1), drawn(np.random.default_rng(0), 2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (np.zeros(2, np.float32), -np.zeros(2, np.float32)),
        (np.zeros(4, np.int32), np.zeros(2, np.int64)),
        (np.array([None, 1]), np.array([None, 2])),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_values_have_other_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)


def test_a_set_has_no_order_and_nan_is_itself() -> None:
    numbers = [f"n{i}" for i in range(100)]
    backwards = numbers[::-1]
    assert fingerprint(set(numbers)) == fingerprint(set(backwards))
    assert fingerprint([math.nan]) == fingerprint([math.nan])


def test_what_cant_be_looked_at_is_left_out_and_the_rest_is_not() -> None:
    for odd in (threading.Lock(), logging.getLogger("x"), (n for n in range(3)), Shy(), open, len, Plain):
        assert fingerprint([odd, 1]) == fingerprint([odd, 1]) != fingerprint([odd, 2])


def test_a_value_may_hold_itself_be_deep_or_be_huge() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert fingerprint(deep) == fingerprint(deep)
    assert fingerprint(list(range(3 * LARGEST))) == fingerprint(list(range(3 * LARGEST)))
    names = [f"n{i}" for i in range(LARGEST + 1)]
    backwards = names[::-1]
    assert fingerprint(set(names)) == fingerprint(set(backwards))
