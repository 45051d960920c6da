"""A hop is a plain typed function: `@hop`, `@fold` and `@effect` only attach facts; signatures say the rest.

Positional parameters are input ports, keyword-only parameters are configuration or resources, and the return
annotation gives the output ports (a NamedTuple: one a field). `read_spec` turns a function into a HopSpec.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from flowgraph.engines.protocol import Engine
from flowgraph.errors import Place
from flowgraph.learners.protocol import Learner
from flowgraph.models.tokenizer import Tokenizer
from flowgraph.spec import types as T
from flowgraph.spec.dims import Expr, parse_shape

HopKind = Literal["hop", "fold", "effect"]
PortKind = Literal["array", "text", "json", "tensors", "scalars", "rows", "value"]
RESOURCES: dict[Any, str] = {Engine: "engine", Learner: "learner", Tokenizer: "tokenizer"}
F = TypeVar("F", bound=Callable[..., Any])


class Facts(msgspec.Struct, frozen=True):
    """What a decorator says of its function; the signature says the rest."""

    kind: HopKind
    owner: str | None = None
    lifetime: T.Lifetime = "firing"
    maps: str | None = None
    expand: tuple[T.RowKind, T.RowKind] | None = None
    collect: tuple[T.RowKind, T.RowKind] | None = None
    source: T.RowKind | None = None
    uses: str | None = None
    validate: Callable[..., None] | None = None
    room: Callable[..., int] | None = None


class Port(msgspec.Struct, frozen=True):
    """One named, typed input or output.

    shape: dims of one value; "" is a scalar. Text and Json have at most one dim, Tensors and Scalars none.
    row_kind: for rows, which kind
    columns: for an output of rows, what each new row carries
    """

    name: str
    kind: PortKind
    dtype: str = ""
    shape: tuple[Expr, ...] = ()
    mean: int = 0
    max: int = 0
    mode: T.ReadMode = "queue"
    initial: int | None = None
    facts: tuple[T.Fact, ...] = ()
    row_kind: T.RowKind | None = None
    columns: tuple[Port, ...] = ()
    optional: bool = False

    def __str__(self) -> str:
        dims = ", ".join(str(d) for d in self.shape)
        if self.kind == "array":
            short = self.dtype.replace("uint", "u").replace("int", "i").replace("bfloat", "bf").replace("float", "f")
            return f"{short}[{dims}]"
        return f"{self.row_kind} rows" if self.kind == "rows" else f"{self.kind}[{dims}]" if dims else self.kind


class Param(msgspec.Struct, frozen=True):
    """One keyword-only parameter: where its value comes from, its type and its default."""

    name: str
    origin: Literal["with", "dim", "seam", "run", "resource"]
    type: Any = None
    default: Any = inspect.Parameter.empty
    detail: str = ""
    fact: str = ""

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


class HopSpec(msgspec.Struct, frozen=True):
    """All that flowgraph knows of a hop without running it."""

    use: str
    function: Any
    facts: Facts
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    params: tuple[Param, ...]
    state: Any
    place: Place
    doc: str

    def input(self, name: str) -> Port | None:
        return next((p for p in self.inputs if p.name == name), None)

    @property
    def columns(self) -> tuple[Port, ...]:
        """What its rows carry: a fold's row columns, else the outputs that hold payload."""
        own: list[Port] = []
        for port in self.outputs:
            own += port.columns if port.kind == "rows" else [port] if port.kind != "value" else []
        return tuple(p for p in own if p.kind != "scalars")


class HopTypeError(TypeError):
    """A hop's signature can't be read as ports; `what` and `help` become a finding at the graph's `use:`."""

    def __init__(self, what: str, help: str) -> None:
        self.what, self.help = what, help
        super().__init__(f"{what}; {help}")


def _attach(**facts: Any) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        function.__flowgraph__ = Facts(**facts)  # type: ignore[attr-defined]
        return function

    return decorate


def hop(
    *,
    owner: str | None = None,
    lifetime: T.Lifetime = "firing",
    maps: str | None = None,
    validate: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Declare a pure function. `maps="leaf"`: the result is the same however the rows are split or batched.

    `validate(**config)` is called by the check with the hop's `with:` and raises ValueError for a bad one.
    """
    return _attach(kind="hop", owner=owner, lifetime=lifetime, maps=maps, validate=validate)


def fold(
    *,
    owner: str | None = "driver",
    lifetime: T.Lifetime = "firing",
    source: T.RowKind | None = None,
    expand: tuple[T.RowKind, T.RowKind] | None = None,
    collect: tuple[T.RowKind, T.RowKind] | None = None,
    validate: Callable[..., None] | None = None,
    room: Callable[..., int] | None = None,
) -> Callable[[F], F]:
    """Declare `step(state, ports…) → decisions` over an explicit state that it alone may mutate.

    It fires when any input changes. At most one queue or event port holds a row, the others are None; latest
    ports always hold their newest value. A change of rate is a `source`, an `expand` or a `collect`.
    `room(state)` says how many more queued rows it takes now (default: always one more).
    """
    return _attach(
        kind="fold", owner=owner, lifetime=lifetime, source=source, expand=expand, collect=collect, validate=validate,
        room=room,
    )  # fmt: skip


def effect(
    *,
    uses: type[Any],
    owner: str | None = None,
    lifetime: T.Lifetime = "firing",
    maps: str | None = None,
    validate: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Declare a function that uses a resource (`Engine` or `Learner`); `async def` runs many firings at once."""
    return _attach(
        kind="effect", uses=RESOURCES[uses], owner=owner, lifetime=lifetime, maps=maps, validate=validate
    )


def read_spec(use: str, function: Any) -> HopSpec:
    """Read ports, parameters and state off a decorated function. Raises HopTypeError naming what can't be read."""
    facts = getattr(function, "__flowgraph__", None)
    if not isinstance(facts, Facts):
        raise HopTypeError(f"{use} is no hop", "decorate the function with @flowgraph.hop, @fold or @effect")
    hints = typing.get_type_hints(function, include_extras=True)
    inputs: list[Port] = []
    params: list[Param] = []
    state = None
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        if hint is None:
            raise HopTypeError(f"parameter {name} of {use} has no type", "annotate it")
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            params.append(_param(name, hint, parameter.default))
        elif facts.kind == "fold" and state is None:
            state = hint
        else:
            port = _port(use, name, hint)
            inputs.append(msgspec.structs.replace(port, optional=parameter.default is not inspect.Parameter.empty))
    outputs = tuple(_outputs(use, hints.get("return"), facts))
    code = inspect.unwrap(function).__code__
    place = Place(_short(code.co_filename), code.co_firstlineno, 1)
    return HopSpec(use, function, facts, tuple(inputs), outputs, tuple(params), state, place, inspect.getdoc(function) or "")


def _short(path: str) -> str:
    """The file from the package on, so that messages do not depend on where the package is installed."""
    parts = path.replace("\\", "/").split("/")
    for package in ("hops", "flowgraph"):
        if package in parts[:-1]:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    return parts[-1]


def _param(name: str, hint: Any, default: Any) -> Param:
    if hint in RESOURCES:
        return Param(name, "resource", hint, default, RESOURCES[hint])
    for marker in getattr(hint, "__metadata__", ()):
        match marker:
            case T.Dim(name=detail):
                return Param(name, "dim", hint.__origin__, default, detail)
            case T.Seam(port=detail, fact=fact):
                return Param(name, "seam", hint.__origin__, default, detail, fact)
            case T.Run(name=detail):
                return Param(name, "run", hint.__origin__, default, detail)
    return Param(name, "with", hint, default)


def _outputs(use: str, hint: Any, facts: Facts) -> list[Port]:
    if hint is None:
        raise HopTypeError(f"{use} has no return type", "annotate what it returns")
    if hint is type(None):
        return []
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        fields = typing.get_type_hints(hint, include_extras=True)
        return [_port(use, name, fields[name], output=True) for name in hint._fields]
    return [_port(use, "out", hint, output=True)]


def _port(use: str, name: str, hint: Any, *, output: bool = False) -> Port:
    base, markers = _unwrap(hint)
    facts = tuple(m for m in markers if isinstance(m, T.Fact))
    mode: T.ReadMode = "queue"
    initial = None
    for marker in markers:
        if isinstance(marker, T.Latest):
            mode, initial = "latest", marker.initial
        elif isinstance(marker, T.Event):
            mode = "event"
    common: dict[str, Any] = {"name": name, "facts": facts, "mode": mode, "initial": initial}
    for marker in markers:
        match marker:
            case T.Rows(kind=kind):
                columns = _columns(use, base) if output else ()
                return Port(kind="rows", row_kind=kind, columns=columns, **common)
            case T.Text(dim=dim, mean=mean, max=bound):
                return Port(kind="text", shape=parse_shape(dim), mean=mean, max=bound, **common)
            case T.Json(dim=dim, mean=mean, max=bound):
                return Port(kind="json", shape=parse_shape(dim), mean=mean, max=bound, **common)
            case T.Tensors():
                return Port(kind="tensors", **common)
            case T.Scalars():
                return Port(kind="scalars", **common)
    if hasattr(base, "dim_str") and hasattr(base, "dtypes"):
        return Port(kind="array", dtype=_exact_dtype(use, name, base), shape=_shape(use, name, base), **common)
    if mode != "queue":
        return Port(kind="value", **common)
    raise HopTypeError(
        f"port {name} of {use} has a type that is no port: {base}",
        "use a jaxtyping array such as Float32[Array, \"token\"], or Annotated[…, Text() | Json() | Tensors() | Rows(…)]",
    )  # fmt: skip


def _unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Annotated[X | None, markers] and Annotated[X, markers] | None → (X, markers)."""
    markers: tuple[Any, ...] = ()
    while True:
        if typing.get_origin(hint) is Annotated:
            markers = (*markers, *hint.__metadata__)
            hint = hint.__origin__
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            rest = [a for a in typing.get_args(hint) if a is not type(None)]
            if len(rest) != 1:
                return hint, markers
            hint = rest[0]
        else:
            return hint, markers


def _exact_dtype(use: str, name: str, base: Any) -> str:
    if set(base.dtypes) <= {"bool", "bool_"}:
        return "bool"
    if len(base.dtypes) != 1:
        raise HopTypeError(
            f"port {name} of {use} has no exact dtype: {base.dtype.__name__}",
            "say the width, e.g. Float32 instead of Float",
        )
    return str(base.dtypes[0])


def _shape(use: str, name: str, base: Any) -> tuple[Expr, ...]:
    try:
        return parse_shape(base.dim_str)
    except ValueError as error:
        raise HopTypeError(f"port {name} of {use}: {error}", 'write dims such as "leaf+1 layer"') from error


def _columns(use: str, base: Any) -> tuple[Port, ...]:
    """The columns that a fold's emitted rows carry: fields of the element type but `parents` and `tag`."""
    if typing.get_origin(base) not in (list, tuple, collections.abc.Sequence):
        raise HopTypeError(f"{use} emits rows as {base}", "annotate the port as a list of rows")
    element = typing.get_args(base)[0]
    if element is T.Row:
        return ()
    fields = typing.get_type_hints(element, include_extras=True)
    return tuple(_port(use, n, fields[n], output=True) for n in element._fields if n not in ("parents", "tag"))
