"""A fact finds the ports that it speaks of, or is refused with one fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import pytest
from jaxtyping import Bool, Float32, Int32, Int64, UInt8

from flowgraph import Array, Below, Derivable, LastToken, Mask, Shared, TiledOver, hop
from flowgraph.spec.facts import FactError, companions
from flowgraph.spec.hop import HopSpec, read_spec
from hops.advantage import grpo
from hops.reward import score

Tokens = Int32[Array, "token"]
Tiled = Annotated[Float32[Array, "token"], TiledOver("leaf")]
Offsets = Int64[Array, "leaf+1"]
Valid = Annotated[Bool[Array, "token"], Mask()]


def spec(function: Callable[..., Any]) -> HopSpec:
    return read_spec("m.f", function)


def found(function: Callable[..., Any], port: str) -> tuple[str, str]:
    one = spec(function)
    of = next(p for p in (*one.columns, *one.inputs) if p.name == port)
    (fact,) = (f for f in of.facts if not isinstance(f, Mask))
    assert isinstance(fact, LastToken | TiledOver | Shared)
    return companions(one, of, fact)


def test_the_ports_of_the_shipped_hops_are_found() -> None:
    assert found(grpo, "out") == ("leaf_offsets", "response_mask")
    assert found(score, "token_level_rewards") == ("leaf_offsets", "response_mask")


class Given(NamedTuple):
    value: Tiled
    own_offsets: Offsets


@hop()
def gives_its_own_bounds(tokens: Tokens, offsets: Offsets, valid: Valid) -> Given:
    raise NotImplementedError


def test_an_output_has_its_own_bounds_where_the_hop_gives_any() -> None:
    assert found(gives_its_own_bounds, "value") == ("own_offsets", "valid")


def test_without_a_mask_every_token_is_valid_and_shared_rows_need_none() -> None:
    @hop()
    def unmasked(offsets: Offsets) -> Tiled:
        raise NotImplementedError

    @hop()
    def shared(offsets: Offsets, valid: Valid) -> Annotated[Int32[Array, "token"], Shared("leaf")]:
        raise NotImplementedError

    assert found(unmasked, "out") == ("offsets", "")
    assert found(shared, "out") == ("offsets", "")


def test_a_name_decides_between_several() -> None:
    @hop()
    def named(
        first: Offsets, second: Offsets, prompt: Valid, answer: Valid
    ) -> Annotated[Float32[Array, "token"], LastToken("leaf", bounds="second", mask="answer")]:
        raise NotImplementedError

    assert found(named, "out") == ("second", "answer")


def double(once: Any) -> Any:
    return 2 * once


class Derived(NamedTuple):
    once: Int64[Array, "leaf"]
    twice: Annotated[Int64[Array, "leaf"], Derivable(double, ("once",))]


@hop()
def derives(tokens: Tokens) -> Derived:
    raise NotImplementedError


def test_what_is_derived_by_a_module_s_function_from_another_output_is_accepted() -> None:
    assert [p.name for p in spec(derives).columns] == ["once", "twice"]


class FromItself(NamedTuple):
    once: Int64[Array, "leaf"]
    twice: Annotated[Int64[Array, "leaf"], Derivable(double, ("twice",))]


class InACircle(NamedTuple):
    once: Annotated[Int64[Array, "leaf"], Derivable(double, ("twice",))]
    twice: Annotated[Int64[Array, "leaf"], Derivable(double, ("once",))]


@pytest.mark.parametrize(
    ("inputs", "output", "message"),
    [
        ({"x": Tokens}, Tiled, r"needs an integer port of shape leaf\+1, and there is none"),
        ({"x": Float32[Array, "leaf+1"]}, Tiled, "there is none"),
        ({"x": Int64[Array, "leaf+1 leaf+1"]}, Tiled, "there is none"),
        ({"a": Offsets, "b": Offsets}, Tiled, "may mean any of a, b as its bounds"),
        ({"a": Offsets, "m": Valid, "n": Valid}, Tiled, "may mean any of m, n as its mask"),
        (
            {"a": Offsets},
            Annotated[Float32[Array, "token"], LastToken("leaf", bounds="b")],
            "names b as its bounds, which is not an integer port",
        ),
        (
            {"a": Offsets, "m": Bool[Array, "token"]},
            Annotated[Float32[Array, "token"], LastToken("leaf", mask="m")],
            "names m as its mask, which is not a Mask port",
        ),
        ({"a": Offsets}, Annotated[Float32[Array, ""], TiledOver("leaf")], "is said of a single value"),
        ({"a": Offsets}, Annotated[Float32[Array, "token"], TiledOver("le/af")], "is no sum or product"),
        ({"a": Offsets}, Annotated[UInt8[Array, "token"], Mask()], r"Mask of port out of m\.f is said of u8"),
        ({"a": Offsets}, Annotated[Float32[Array, "token"], Below("vocab")], "Below of port out"),
        ({"a": Offsets}, Annotated[Int32[Array, "token"], Below("vo cab")], "is no sum or product"),
        ({"a": Offsets}, FromItself, "is derived from twice"),
        ({"a": Offsets}, InACircle, "which is derived itself"),
        ({"a": Annotated[Int64[Array, "leaf"], Derivable(double, ("b",))]}, Offsets, "said of an input"),
    ],
)
def test_a_fact_that_nothing_can_be_made_of_is_refused(
    inputs: dict[str, Any], output: Any, message: str
) -> None:
    source = f"def f({', '.join(inputs)}): raise NotImplementedError"
    scope: dict[str, Any] = {}
    exec(source, scope)
    scope["f"].__annotations__ = {**inputs, "return": output}
    with pytest.raises(FactError, match=message) as error:
        spec(hop()(scope["f"]))
    assert error.value.help
    assert error.value.code == "FG206"
