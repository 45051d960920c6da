"""The dim algebra against Python's own arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.spec.dims import Expr, integer, parse, parse_shape, symbol

NAMES = ("leaf", "token", "prompt")
VALUES = st.fixed_dictionaries({name: st.integers(0, 50) for name in NAMES})
TEXTS = st.recursive(
    st.sampled_from(NAMES) | st.integers(0, 9).map(str),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*"), inner).map("({0[0]}{0[1]}{0[2]})".format)
        | inner.map("-{}".format)
    ),
    max_leaves=7,
)
EXPRS = TEXTS.map(parse)


@given(TEXTS, VALUES)
def test_an_expression_has_the_value_that_python_gives_it(text: str, values: dict[str, float]) -> None:
    assert parse(text).at(values) == eval(text, {}, dict(values))


@given(EXPRS, EXPRS, EXPRS)
def test_sums_and_products_obey_the_laws_of_a_ring(a: Expr, b: Expr, c: Expr) -> None:
    assert a + b == b + a
    assert a * b == b * a
    assert (a + b) + c == a + (b + c)
    assert (a * b) * c == a * (b * c)
    assert a * (b + c) == a * b + a * c
    assert a + integer(-1) * a == Expr()
    assert a * integer(1) == a == a + integer(0)


@given(EXPRS)
def test_what_is_printed_reads_as_the_same_expression(a: Expr) -> None:
    assert parse(str(a)) == a


@given(EXPRS, EXPRS, VALUES)
def test_substituting_and_evaluating_commute(a: Expr, b: Expr, values: dict[str, float]) -> None:
    assert a.substitute({"leaf": b}).at(values) == a.at({**values, "leaf": b.at(values)})
    assert "leaf" not in a.substitute({"leaf": integer(3)}).names


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("response+prompt", "prompt+response"),
        ("1+leaf", "leaf+1"),
        ("a-a", "0"),
        ("2*(x-1)", "2*x-2"),
        ("0-x+3", "-x+3"),
        ("a*b*a", "a*a*b"),
    ],
)
def test_one_spelling_for_equal_expressions(text: str, printed: str) -> None:
    assert str(parse(text)) == printed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/b",
        "a**2",
        "f(a)",
        "a b",
        "True",
        "1.5",
        "...",
        "*batch",
        "a=3",
        "'a'",
        "(" * 500,
        "\0",
        "-" * 9999 + "a",
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no sum or product of dims and integers"):
        parse(text)


def test_a_shape_is_dims_between_spaces() -> None:
    assert parse_shape("") == ()
    assert parse_shape("leaf+1  layer") == (symbol("leaf") + integer(1), symbol("layer"))
