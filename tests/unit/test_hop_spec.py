"""A function's signature is read as ports, parameters and state, or refused with one fix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jaxtyping
import msgspec
import pytest
from jaxtyping import Bool, Complex64, Float, Float32, Int32, Int64, Shaped

from flowgraph import (
    Array,
    Below,
    Dim,
    Engine,
    Event,
    Json,
    LastToken,
    Latest,
    Mask,
    Row,
    Rows,
    Run,
    Scalars,
    Seam,
    Tensors,
    Text,
    TiledOver,
    effect,
    fold,
    hop,
)
from flowgraph.spec.dims import parse
from flowgraph.spec.hop import HopSpec, read_spec
from flowgraph.spec.ports import HopTypeError, Port


def spec(function: Callable[..., Any]) -> HopSpec:
    return read_spec("m.f", function)


class Out(NamedTuple):
    """Two ports and metrics."""

    a: Annotated[Float32[Array, "token"], TiledOver("leaf")]
    b: Annotated[Bool[Array, "token"], Mask]
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="trainer", lifetime="step", maps="leaf")
def plain(
    tokens: Int32[Array, "token"],
    offsets: Int64[Array, "leaf+1"],
    text: Annotated[list[str], Text("leaf", max=9)],
    extra: Annotated[Any, Json()] = None,
    *,
    eps: float = 1e-6,
    top: Annotated[int, Dim("response")],
    lag: Annotated[int, Seam("version", "max_lag")] = 0,
    seed: Annotated[int, Run("seed")],
) -> Out:
    """Does nothing."""
    raise NotImplementedError


def test_positional_parameters_are_inputs_and_fields_are_outputs() -> None:
    one = spec(plain)
    assert [(p.name, str(p), p.optional) for p in one.inputs] == [
        ("tokens", "i32[token]", False),
        ("offsets", "i64[leaf+1]", False),
        ("text", "text[leaf]", False),
        ("extra", "json", True),
    ]
    assert [(p.name, str(p), p.facts) for p in one.outputs] == [
        ("a", "f32[token]", (TiledOver("leaf"),)),
        ("b", "bool[token]", (Mask(),)),
        ("metrics", "scalars", ()),
    ]
    assert [p.name for p in one.columns] == ["a", "b"]
    assert (one.facts.owner, one.facts.lifetime, one.doc) == ("trainer", "step", "Does nothing.")
    assert one.place.file == "test_hop_spec.py"


def test_keyword_only_parameters_say_where_their_value_comes_from() -> None:
    origins = [(p.name, p.origin, p.detail, p.fact, p.required) for p in spec(plain).params]
    assert origins == [
        ("eps", "with", "", "", False),
        ("top", "dim", "response", "", True),
        ("lag", "seam", "version", "max_lag", False),
        ("seed", "run", "seed", "", True),
    ]


class State(msgspec.Struct):
    n: int = 0


class Made(NamedTuple):
    parents: tuple[Row, ...]
    tag: int
    key: Int32[Array, ""]


class Emitted(NamedTuple):
    made: Annotated[list[Made], Rows("trajectory")]
    count: Annotated[int, Latest(initial=3)]


def test_the_first_parameter_of_a_fold_is_its_state_and_rows_have_columns() -> None:
    @fold(expand=("group", "trajectory"))
    def step(
        state: State,
        group: Annotated[Row | None, Rows("group")],
        done: Annotated[Row | None, Rows("step"), Event()],
    ) -> Emitted:
        raise NotImplementedError

    one = spec(step)
    assert one.state is State
    assert [(p.name, p.row_kind, p.mode) for p in one.inputs] == [
        ("group", "group", "queue"),
        ("done", "step", "event"),
    ]
    assert [(p.name, str(p)) for p in one.columns] == [("key", "i32[]")]
    assert (one.outputs[1].mode, one.outputs[1].initial, one.outputs[1].dtype) == ("latest", 3, "Version")
    assert one.outputs[1].wider == ("int",)


def test_an_effect_uses_a_resource() -> None:
    @effect(uses=Engine)
    async def roll(
        w: Annotated[dict[str, Any], Tensors()], *, engine: Engine
    ) -> Annotated[int, Latest(initial=0)]:
        raise NotImplementedError

    one = spec(roll)
    assert one.facts.uses == "engine"
    assert [(p.name, p.origin, p.detail) for p in one.params] == [("engine", "resource", "engine")]
    assert [(p.name, p.kind) for p in one.outputs] == [("out", "value")]


def test_every_exact_dtype_of_jaxtyping_is_read() -> None:
    for name in ("Int8", "UInt64", "Float16", "Float64", "BFloat16", "Float8e4m3fn", "Bool"):

        def f(x: Any) -> None:
            raise NotImplementedError

        f.__annotations__["x"] = getattr(jaxtyping, name)[Array, "n"]
        assert spec(hop()(f)).inputs[0].dtype == name.lower().replace("float8e4m3fn", "float8_e4m3fn")


def refused(annotation: Any, *, output: bool = False) -> str:
    def f(x: Any) -> None:
        raise NotImplementedError

    f.__annotations__ = (
        {"x": Int32[Array, "n"], "return": annotation} if output else {"x": annotation, "return": None}
    )
    with pytest.raises(HopTypeError) as error:
        spec(hop()(f))
    assert error.value.help
    return error.value.what


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (int, "has a type that is no port: int"),
        (list[int], "has a type that is no port"),
        (Float[Array, "n"], "has no exact dtype: Float"),
        (Shaped[Array, "n"], "has no exact dtype: Shaped"),
        (Complex64[Array, "n"], "complex64 is no dtype that crosses a seam"),
        (Int32[Array, "*batch n"], "'\\*batch' is no sum or product"),
        (Int32[Array, "..."], "is no sum or product"),
        (Int32[Array, "_ n"], "a dim of '_ n' has no name"),
        (Annotated[str, Text("a b")], "has 2 dims, at most 1"),
        (Annotated[str, Text("a/")], "is no sum or product"),
        (Annotated[dict[str, float], Scalars()], "takes scalars, which no hop reads"),
        (Annotated[Float32[Array, "n"], LastToken], "LastToken names no dim"),
        (Annotated[Row, Rows("leaf")], "rows of no kind: 'leaf'"),  # type: ignore[arg-type]
        ("Missing", "an annotation of m.f can't be read: NameError"),
    ],
)
def test_an_annotation_that_is_no_port_is_refused(annotation: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refused(annotation))


def test_rows_are_emitted_as_a_list_of_named_tuples() -> None:
    assert "emits rows as" in refused(Annotated[Row, Rows("group")], output=True)
    assert "emits rows as" in refused(Annotated[list[int], Rows("group")], output=True)


class Called:
    def __call__(self, x: Int32[Array, "n"]) -> None:
        raise NotImplementedError


def test_what_is_no_hop_is_refused() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def many(*x: Int32[Array, "n"]) -> None:
        raise NotImplementedError

    def silent(x: Int32[Array, "n"]):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def nothing() -> Callable[..., None]:
        def stateless() -> None:
            raise NotImplementedError

        return stateless

    for function, message in (
        (len, "m.f is no hop"),
        (3, "m.f is no hop: it is an object of type int, and no function"),
        (State, "m.f is no hop: it is a class, and no function; name a function"),
        (
            functools.partial(plain, eps=1.0),
            "m.f is no hop: it is an object of type partial, and no function",
        ),
        (hop()(functools.partial(plain, eps=1.0)), "it is an object of type partial"),
        (hop()(Called()), "m.f is no hop: it is an object of type Called"),
        (hop()(untyped), "parameter x of m.f has no type"),
        (hop()(many), "takes any number of values"),
        (hop()(silent), "has no return type"),
        (fold()(nothing()), "has no state"),
        (hop(lifetime="ages")(nothing()), "has no lifetime 'ages'"),  # type: ignore[arg-type]
        (fold(source="leaf")(nothing()), "has no row kind 'leaf'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(HopTypeError, match=message):
            spec(function)  # type: ignore[arg-type]


def test_a_port_is_shown_in_one_short_notation() -> None:
    assert (
        str(Port(name="x", kind="array", dtype="bfloat16", shape=(parse("leaf"), parse("2*h+1"))))
        == "bf16[leaf, 2*h+1]"
    )
    assert str(Port(name="x", kind="array", dtype="uint8")) == "u8[]"
    assert str(Port(name="x", kind="tensors")) == "tensors"
    assert str(Port(name="x", kind="rows", row_kind="step")) == "step rows"


def test_a_hop_that_never_could_fire_is_refused() -> None:
    @hop()
    def takes_rows(rows: Annotated[Row, Rows("trajectory")]) -> Annotated[dict[str, float], Scalars()]:
        raise NotImplementedError

    @hop()
    def event_and_column(
        tokens: Int32[Array, "token"], version: Annotated[int, Event()]
    ) -> Annotated[dict[str, float], Scalars()]:
        raise NotImplementedError

    @hop()
    def two_events(
        one: Annotated[int, Event()], two: Annotated[int, Event()]
    ) -> Annotated[dict[str, float], Scalars()]:
        raise NotImplementedError

    with pytest.raises(HopTypeError, match="takes rows as rows, and only a fold can"):
        spec(takes_rows)
    for function in (event_and_column, two_events):
        with pytest.raises(HopTypeError, match="beside other inputs"):
            spec(function)


class Pooled(NamedTuple):
    ready: Annotated[tuple[Row, ...], Rows("trajectory"), Latest()]
    mean: Float32[Array, ""]


def test_a_fold_that_handles_payload_is_refused() -> None:
    @fold()
    def takes_column(state: State, key: Int64[Array, ""]) -> None:
        raise NotImplementedError

    @fold()
    def gives_column(state: State, row: Annotated[Row | None, Rows("trajectory")]) -> Pooled:
        raise NotImplementedError

    with pytest.raises(
        HopTypeError, match=r"fold m\.f takes key as i64\[\], and a fold reads columns of the rows"
    ):
        spec(takes_column)
    with pytest.raises(
        HopTypeError, match=r"fold m\.f gives mean as f32\[\], and a fold gives rows and plain"
    ):
        spec(gives_column)


class Needs(msgspec.Struct):
    """A state that can't be made empty."""

    n: int


def test_a_fold_whose_state_has_no_empty_form_is_refused() -> None:
    @fold(source="group")
    def source(state: Needs) -> Out:
        raise NotImplementedError

    with pytest.raises(HopTypeError, match=r"the state of fold m\.f can't be made empty"):
        spec(source)


class Kept(NamedTuple):
    kept: Annotated[list[Row], Rows("trajectory")]


class New(NamedTuple):
    parents: tuple[Row, ...]


class Renewed(NamedTuple):
    kept: Annotated[list[New], Rows("trajectory")]


def test_a_fold_hands_on_rows_that_are_there_and_makes_only_what_it_declares() -> None:
    def filtered(state: State, row: Annotated[Row | None, Rows("trajectory")]) -> Kept:
        raise NotImplementedError

    def renewed(state: State, row: Annotated[Row | None, Rows("trajectory")]) -> Renewed:
        raise NotImplementedError

    for fact in (fold(), fold(expand=("group", "trajectory"))):
        assert [(p.name, p.handed) for p in spec(fact(filtered)).outputs] == [("kept", True)]
    with pytest.raises(HopTypeError, match=r"fold m\.f gives kept as trajectory rows that it does not make"):
        spec(fold()(renewed))
    assert [p.name for p in spec(fold(expand=("group", "trajectory"))(renewed)).outputs] == ["kept"]


@pytest.mark.parametrize(
    ("annotation", "help"),
    [
        (Annotated[Row, Rows("trajectory")], r"Row \| None"),
        (Annotated[Row, Rows("step"), Event()], r"Row \| None"),
        (Annotated[int, Event()], r"int \| None"),
    ],
)
def test_what_comes_to_a_fold_may_be_none(annotation: Any, help: str) -> None:
    def step(state: State, came: Any, ready: Annotated[tuple[Row, ...], Rows("step"), Latest()]) -> None:
        raise NotImplementedError

    step.__annotations__["came"] = annotation
    with pytest.raises(HopTypeError, match=rf"takes came as never None.*annotate it as {help}"):
        spec(fold()(step))
    for widened in (annotation | None, Annotated[annotation.__origin__ | None, *annotation.__metadata__]):
        step.__annotations__["came"] = widened
        assert spec(fold()(step)).inputs[0].name == "came"


def test_a_fold_reads_a_column_as_a_mapping_from_the_row_and_a_hop_does_not() -> None:
    @fold()
    def step(
        state: State,
        ready: Annotated[tuple[Row, ...], Rows("trajectory"), Latest()],
        score: Mapping[int, Float32[Array, "leaf"]],
        note: Mapping[int, Annotated[str, Text("leaf")]] | None = None,
        bare: Float32[Array, "leaf"] | None = None,
        below: Annotated[Mapping[int, Int32[Array, ""]] | None, Below("vocab")] = None,
    ) -> None:
        raise NotImplementedError

    assert [str(p) for p in spec(step).inputs[1:]] == ["f32[leaf]", "text[leaf]", "f32[leaf]", "i32[]"]
    assert "a type that is no port" in refused(Mapping[int, Float32[Array, "leaf"]])
