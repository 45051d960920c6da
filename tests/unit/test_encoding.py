"""Text and JSON: what fits and is finite comes back, and anything else is refused by hop and port."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
import pytest
from jaxtyping import Int32

from flowgraph import Array, Json, Text, hop
from flowgraph.errors import PayloadError
from flowgraph.plan.compile import compile_file
from flowgraph.plan.plan import Hop
from flowgraph.runtime.writing import checked
from tests.runtime.harness import TOY


class Said(NamedTuple):
    text: Annotated[str, Text(max=8)]
    texts: Annotated[list[str], Text("leaf", max=8)]
    note: Annotated[Any, Json(max=16)]
    notes: Annotated[list[Any], Json("leaf", max=16)]


@hop(owner="trainer", lifetime="consumed")
def says(tokens: Int32[Array, "token"]) -> Said:
    raise NotImplementedError


@pytest.fixture(scope="module")
def plan_hop() -> Hop:
    return compile_file(TOY, [f"hops.look={{use: {__name__}.says, in: {{tokens: rollout}}}}"]).hops["look"]


FITS: dict[str, Any] = {
    "text": "12345678",
    "texts": ["a", "é" * 4],
    "note": {"a": [None, 1.5]},
    "notes": [0, "x"],
}


def raw(hop: Hop, **more: Any) -> dict[str, Any]:
    return checked(hop, hop.columns, {**FITS, **more})[0]


def test_what_fits_comes_back(plan_hop: Hop) -> None:
    made = raw(plan_hop)
    assert {name: msgspec.msgpack.decode(made[name]) for name in ("text", "texts")} == {
        name: FITS[name] for name in ("text", "texts")
    }
    assert {name: msgspec.json.decode(made[name]) for name in ("note", "notes")} == {
        name: FITS[name] for name in ("note", "notes")
    }


@pytest.mark.parametrize(
    ("port", "value", "message"),
    [
        ("text", "123456789", "of 9 bytes, and its bound is 8"),
        ("texts", ["", "ééééé"], "of 10 bytes, and its bound is 8"),
        ("note", "x" * 15, "of 17 bytes, and its bound is 16"),
        ("notes", [0, "x" * 15], "of 17 bytes, and its bound is 16"),
    ],
)
def test_each_value_keeps_the_bound_also_where_others_leave_room(
    plan_hop: Hop, port: str, value: Any, message: str
) -> None:
    with pytest.raises(
        PayloadError, match=f"hop look gave {port} {message}\n  help: raise max in the annotation of"
    ):
        raw(plan_hop, **{port: value})


@pytest.mark.parametrize("value", [object(), 1j, "\ud800"])
def test_what_is_no_json_is_refused_by_name(plan_hop: Hop, value: object) -> None:
    with pytest.raises(PayloadError, match=r"error\[FG901\] hop look gave note as what is no Json: "):
        raw(plan_hop, note=value)
    with pytest.raises(PayloadError, match="hop look gave notes as what is no Json: "):
        raw(plan_hop, notes=[0, value])


def test_what_is_in_itself_or_no_unicode_is_refused_by_name(plan_hop: Hop) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(PayloadError, match="hop look gave note as what is no Json: "):
        raw(plan_hop, note=endless)
    with pytest.raises(PayloadError, match="hop look gave text as what is no Text: "):
        raw(plan_hop, text="\ud800")


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_json_does_not_have_is_refused_and_none_is_not(plan_hop: Hop, odd: float) -> None:
    for value in (odd, [odd], {"a": (1.0, odd)}):
        with pytest.raises(
            PayloadError, match=f"hop look gave note with {odd} in it, which JSON does not have"
        ):
            raw(plan_hop, note=value)
    assert raw(plan_hop, note=None)["note"] == b"null"
