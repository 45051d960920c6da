"""The dim algebra: sums and products of named dims and integers, evaluated at the mean or the bound.

`prompt+response` is one expression, whatever the order it is written in; two expressions are equal when
their canonical sums of monomials are.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache

import msgspec

# A monomial is a sorted tuple of dim names (with repeats); a polynomial maps monomials to integer factors.
Monomial = tuple[str, ...]
KEPT = 4096  # a graph has few dims, and says each of them many times


class Size(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How large a dim is: its mean (for pricing) and its bound (for allocation)."""

    mean: float
    max: int


class Expr(msgspec.Struct, frozen=True):
    """A polynomial over dims with integer coefficients, in canonical form."""

    terms: tuple[tuple[Monomial, int], ...] = ()

    @staticmethod
    def make(terms: Mapping[Monomial, int]) -> Expr:
        return Expr(tuple(sorted((m, c) for m, c in terms.items() if c)))

    def __add__(self, other: Expr) -> Expr:
        out = dict(self.terms)
        for monomial, factor in other.terms:
            out[monomial] = out.get(monomial, 0) + factor
        return Expr.make(out)

    def __mul__(self, other: Expr) -> Expr:
        out: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                monomial = tuple(sorted(left + right))
                out[monomial] = out.get(monomial, 0) + a * b
        return Expr.make(out)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for monomial, _ in self.terms for name in monomial)

    def substitute(self, bindings: Mapping[str, Expr]) -> Expr:
        """Replace each bound name by its expression; others stay."""
        total = Expr()
        for monomial, factor in self.terms:
            product = integer(factor)
            for name in monomial:
                product = product * bindings.get(name, symbol(name))
            total = total + product
        return total

    def at(self, values: Mapping[str, float]) -> float:
        """The value with every name given. Raises KeyError for a missing name."""
        total = 0.0
        for monomial, factor in self.terms:
            product = float(factor)
            for name in monomial:
                product *= values[name]
            total += product
        return total

    def __str__(self) -> str:
        return _text(self.terms)


@lru_cache(KEPT)
def _text(terms: tuple[tuple[Monomial, int], ...]) -> str:
    parts = []
    for monomial, factor in sorted(terms, key=lambda t: (-len(t[0]), t[0])):
        names = "*".join(monomial)
        sign = {1: "", -1: "-"}.get(factor, f"{factor}*")
        parts.append(f"{sign}{names}" if names else str(factor))
    return "+".join(parts).replace("+-", "-") or "0"


def integer(value: int) -> Expr:
    return Expr.make({(): value})


def symbol(name: str) -> Expr:
    return Expr.make({(name,): 1})


@lru_cache(KEPT)
def parse(text: str) -> Expr:
    """Read one dim, e.g. `leaf+1`, `2*layer`, `(prompt+response)*sample`. Raises ValueError naming the text."""
    try:
        return _convert(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no sum or product of dims and integers") from error


def _convert(node: ast.expr) -> Expr:
    match node:
        case ast.Name(id=name):
            return symbol(name)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return integer(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return integer(-1) * _convert(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _convert(left) + _convert(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _convert(left) + integer(-1) * _convert(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _convert(left) * _convert(right)
        case _:
            raise ValueError("not a sum or product")


def parse_shape(text: str) -> tuple[Expr, ...]:
    """Read a jaxtyping shape string: dims separated by spaces; "" is a scalar."""
    return tuple(parse(part) for part in text.split())
