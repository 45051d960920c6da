"""How long prompts and responses are: a distribution, or a trace, seeded by counter.

The i-th value depends on the seed and on i alone, and not on what was asked before it, so two runs that differ in a
setting see the same trajectories.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

BLOCK = 4096  # values that are drawn at once
KEPT = 64  # blocks that are kept, for those that are asked for out of order
Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]
Number = TypeVar("Number", int, float)

# Name → what its numbers are, and how values are drawn from them.
FORMS: dict[str, tuple[str, Callable[..., Draw]]] = {}  # of lengths
SHARES: dict[str, tuple[str, Callable[..., Draw]]] = {}


class Sequence(ABC, Generic[Number]):
    """An endless sequence of numbers. stream: tells sequences of one seed apart."""

    def __init__(self, draw: Draw, seed: int, stream: int) -> None:
        self._draw, self._key = draw, np.array([seed, stream], np.uint64)
        self._blocks: OrderedDict[int, list[Number]] = OrderedDict()

    @abstractmethod
    def _values(self, drawn: Floats) -> list[Number]:
        """What the sequence has of what was drawn."""

    def at(self, i: int) -> Number:
        values = self._blocks.get(i // BLOCK)
        return (values or self._more(i // BLOCK))[i % BLOCK]

    def _drawn(self, block: int) -> Floats:
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, block]))
        return self._draw(generator, block)

    def _more(self, block: int) -> list[Number]:
        values = self._blocks[block] = self._values(self._drawn(block))
        if len(self._blocks) > KEPT:
            self._blocks.popitem(last=False)
        return values


class Drawn(Sequence[float]):
    """Numbers as they are drawn."""

    def _values(self, drawn: Floats) -> list[float]:
        values: list[float] = drawn.tolist()
        return values


class Lengths(Sequence[int]):
    """Whole numbers of tokens, from 1 to `most`."""

    def __init__(self, text: str, *, most: int, seed: int, stream: int) -> None:
        super().__init__(parse(text), seed, stream)
        self.text, self.most = text, most

    def _values(self, drawn: Floats) -> list[int]:
        whole: list[int] = np.clip(np.rint(drawn), 1, self.most).astype(np.int64).tolist()
        return whole

    def cut(self, n: int) -> float:
        """Share of the first n that are drawn longer than `most`."""
        blocks = (self._drawn(block)[: n - block * BLOCK] for block in range(math.ceil(n / BLOCK)))
        return sum(int((np.rint(drawn) > self.most).sum()) for drawn in blocks) / max(1, n)


def parse(text: str) -> Draw:
    """What `lognormal:2000,1.2` and the like mean. Raises ValueError that names what is wrong and what there is.

    lognormal:mean,sigma   exp of a normal; mean is of the length itself, sigma the standard deviation of its logarithm
    exponential:mean       uniform:low,high   fixed:n
    pareto:mean,alpha      the heavy tail P(x > t) ~ t^-alpha, alpha above 1, with this mean
    trace:FILE             one length a line, in order, and again from the first line
    """
    name, _, rest = text.partition(":")
    return _trace(rest) if name == "trace" else _parsed(text, FORMS, "trace:FILE")


def parse_share(text: str) -> Draw:
    """How often a task is solved, from 0 to 1: beta:a,b, uniform:low,high or fixed:p. Raises ValueError."""
    return _parsed(text, SHARES)


def _parsed(text: str, forms: Mapping[str, tuple[str, Callable[..., Draw]]], *more: str) -> Draw:
    name, _, rest = text.partition(":")
    if name not in forms:
        known = ", ".join([*(f"{name}:{form}" for name, (form, _) in forms.items()), *more])
        raise ValueError(f"there is no distribution {name!r}; write one of {known}")
    form, make = forms[name]
    try:
        numbers = [float(one) for one in rest.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(form.split(",")) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{text!r} is not of the form {name}:{form}")
    return make(*numbers)


def _form(
    name: str, numbers: str, shares: bool = False
) -> Callable[[Callable[..., Draw]], Callable[..., Draw]]:
    def register(make: Callable[..., Draw]) -> Callable[..., Draw]:
        (SHARES if shares else FORMS)[name] = numbers, make
        return make

    return register


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value:g}")


@_form("lognormal", "mean,sigma")
def _lognormal(mean: float, sigma: float) -> Draw:
    _positive(mean=mean)
    if sigma < 0:
        raise ValueError(f"sigma must not be negative, and is {sigma:g}")
    middle = math.log(mean) - sigma**2 / 2  # E[exp(N(m, s²))] = exp(m + s²/2)
    return lambda generator, _: np.exp(middle + sigma * generator.standard_normal(BLOCK))


@_form("exponential", "mean")
def _exponential(mean: float) -> Draw:
    _positive(mean=mean)
    return lambda generator, _: mean * generator.standard_exponential(BLOCK)


@_form("uniform", "low,high")
def _uniform(low: float, high: float) -> Draw:
    _positive(low=low)
    if high < low:
        raise ValueError(f"the upper end {high:g} is below the lower end {low:g}")
    return lambda generator, _: low + (high - low) * generator.random(BLOCK)


@_form("pareto", "mean,alpha")
def _pareto(mean: float, alpha: float) -> Draw:
    _positive(mean=mean)
    if not alpha > 1:
        raise ValueError(f"alpha must be above 1, or there is no mean, and is {alpha:g}")
    least = mean * (alpha - 1) / alpha
    return lambda generator, _: least * (1 - generator.random(BLOCK)) ** (-1 / alpha)


@_form("fixed", "n")
def _fixed(n: float) -> Draw:
    _positive(n=n)
    return lambda _, __: np.full(BLOCK, n)


@_form("beta", "a,b", shares=True)
def _beta(a: float, b: float) -> Draw:
    _positive(a=a, b=b)
    return lambda generator, _: generator.beta(a, b, BLOCK)


@_form("uniform", "low,high", shares=True)
def _share_between(low: float, high: float) -> Draw:
    if not 0 <= low <= high <= 1:
        raise ValueError(f"uniform:{low:g},{high:g} is no share of tries: give 0 <= low <= high <= 1")
    return lambda generator, _: low + (high - low) * generator.random(BLOCK)


@_form("fixed", "p", shares=True)
def _share(p: float) -> Draw:
    if not 0 <= p <= 1:
        raise ValueError(f"fixed:{p:g} is no share of tries: give a number from 0 to 1")
    return lambda _, __: np.full(BLOCK, p)


def _line(path: str, number: int, line: str) -> float:
    try:
        value = float(line)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"{path}:{number}: {line.strip()[:40]!r} is no length; write one number above 0 a line"
        )
    return value


def _trace(path: str) -> Draw:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"can't read the trace {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the trace {path!r} is no text; give a file with one length a line") from None
    found = [_line(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"the trace {path!r} is empty; give a file with one length a line")
    values = np.array(found)

    def draw(_: np.random.Generator, block: int) -> Floats:
        return values[np.arange(block * BLOCK, (block + 1) * BLOCK) % len(values)]

    return draw
