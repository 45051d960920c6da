"""Ports: what a type annotation says about one input or output of a hop."""

from __future__ import annotations

import collections.abc
import types
import typing
from typing import Annotated, Any, Literal

import msgspec

from flowgraph.spec import types as T
from flowgraph.spec.dims import Expr, parse_shape

PortKind = Literal["array", "text", "json", "tensors", "scalars", "rows", "value"]

INTEGER = "integer"  # the dtype of an input that takes integers as they lie, and is given no wider ones


class Port(msgspec.Struct, frozen=True):
    """One named, typed input or output.

    dtype: an array's, of an input also INTEGER; for a plain value the name of its type, "" for any
    shape: dims of one value; () is a scalar. Text and Json have at most one dim, Tensors and Scalars none.
    row_kind: for rows, which kind
    columns: for an output of rows, what each new row carries
    handed: the rows of an output are there already, and are shown (latest) or handed on (queue)
    wider: for a plain value of a NewType, what it is made of: a Version is an int too
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
    handed: bool = False
    optional: bool = False
    wider: tuple[str, ...] = ()

    def __str__(self) -> str:
        dims = ", ".join(str(d) for d in self.shape)
        if self.dtype == INTEGER:
            return f"{INTEGER}[{dims}]"
        if self.kind == "array":
            short = (
                self.dtype.replace("uint", "u")
                .replace("int", "i")
                .replace("bfloat", "bf")
                .replace("float", "f")
            )
            return f"{short}[{dims}]"
        return (
            f"{self.row_kind} rows" if self.kind == "rows" else f"{self.kind}[{dims}]" if dims else self.kind
        )


class HopTypeError(TypeError):
    """A hop's signature can't be read as ports; `what` and `help` become a finding at the graph's `use:`."""

    code = "FG201"

    def __init__(self, what: str, help: str) -> None:
        self.what, self.help = what, help
        super().__init__(f"{what}; {help}")


def read_port(use: str, name: str, hint: Any, *, output: bool = False, by_row: bool = False) -> Port:
    """The port that an annotation describes. Raises HopTypeError naming what can't be read.

    by_row: a fold reads it, which may say of a column that it arrives as a mapping from the row's key
    """
    who = f"port {name} of {use}"
    base, markers = _unwrap(who, hint)
    if by_row and _is_mapping(base) and not any(isinstance(m, T.Latest | T.Event) for m in markers):
        base, inner = _unwrap(who, typing.get_args(base)[1])
        markers += inner
    mode: T.ReadMode = "queue"
    initial = None
    for marker in markers:
        if isinstance(marker, T.Latest):
            mode, initial = "latest", marker.initial
        elif isinstance(marker, T.Event):
            mode = "event"
    facts = tuple(m for m in markers if isinstance(m, T.Fact))
    common: dict[str, Any] = {"name": name, "facts": facts, "mode": mode, "initial": initial}
    for marker in markers:
        match marker:
            case T.Rows(kind=kind):
                if kind not in T.ROW_KINDS:
                    raise HopTypeError(
                        f"{who} has rows of no kind: {kind!r}", f"write one of {', '.join(T.ROW_KINDS)}"
                    )
                handed = output and T.Row in _elements(base)
                columns = _columns(use, base) if output and not handed else ()
                return Port(kind="rows", row_kind=kind, columns=columns, handed=handed, **common)
            case T.Text(dim=dim, mean=mean, max=bound):
                return Port(kind="text", shape=_shape(who, dim, 1), mean=mean, max=bound, **common)
            case T.Json(dim=dim, mean=mean, max=bound):
                return Port(kind="json", shape=_shape(who, dim, 1), mean=mean, max=bound, **common)
            case T.Tensors():
                return Port(kind="tensors", **common)
            case T.Scalars():
                if not output:
                    raise HopTypeError(
                        f"{who} takes scalars, which no hop reads", "return them, for metrics.jsonl"
                    )
                return Port(kind="scalars", **common)
    if hasattr(base, "dim_str") and hasattr(base, "dtypes"):
        dtype = INTEGER if not output and _is_integer(base) else _exact_dtype(who, base)
        return Port(kind="array", dtype=dtype, shape=_shape(who, base.dim_str), **common)
    if mode != "queue":
        dtype, *wider = _value_type(base)
        return Port(kind="value", dtype=dtype, wider=tuple(wider), **common)
    raise HopTypeError(
        f"{who} has a type that is no port: {getattr(base, '__name__', base)}",
        'write an array such as Float32[Array, "token"], or Annotated[…, Text() | Json() | Tensors() | Rows(…)]',
    )


def _unwrap(who: str, hint: Any) -> tuple[Any, list[Any]]:
    """Annotated[X | None, markers] and Annotated[X, markers] | None → (X, markers)."""
    markers: list[Any] = []
    while True:
        if typing.get_origin(hint) is Annotated:
            markers += [_instance(who, marker) for marker in hint.__metadata__]
            hint = hint.__origin__
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            rest = [a for a in typing.get_args(hint) if a is not type(None)]
            if len(rest) != 1:
                return hint, markers
            hint = rest[0]
        else:
            return hint, markers


def _is_mapping(base: Any) -> bool:
    return typing.get_origin(base) in (dict, collections.abc.Mapping) and len(typing.get_args(base)) == 2


def _instance(who: str, marker: Any) -> Any:
    """`Mask` means `Mask()`; a promise that needs a dim can't be made without."""
    if not isinstance(marker, type) or marker.__module__ != T.__name__:
        return marker
    try:
        return marker()
    except TypeError:
        raise HopTypeError(
            f"{who}: {marker.__name__} names no dim", f'write {marker.__name__}("leaf")'
        ) from None


def _value_type(base: Any) -> list[str]:
    """The name of a plain value's type, or of what it is a list of; behind it, of what a NewType is made of.

    "" is anything.
    """
    if typing.get_origin(base) in (list, tuple, collections.abc.Sequence):
        base = typing.get_args(base)[0]
    name = "" if base is Any else getattr(base, "__name__", str(base))
    return [name, *_value_type(base.__supertype__)] if isinstance(base, typing.NewType) else [name]


def _is_integer(base: Any) -> bool:
    """`Integer[Array, …]`: whatever integers there are."""
    dtypes = base.dtypes if isinstance(base.dtypes, (tuple, list)) else ()
    return {"int8", "uint8", "int64", "uint64"} <= set(dtypes) and all("int" in one for one in dtypes)


def _exact_dtype(who: str, base: Any) -> str:
    dtypes = tuple(base.dtypes) if isinstance(base.dtypes, (tuple, list)) else ()
    if dtypes and set(dtypes) <= {"bool", "bool_"}:
        return "bool"
    if len(dtypes) != 1:
        help = "say the width, e.g. Float32 instead of Float"
        if _is_integer(base):
            help = "say the width, e.g. Int32; only who reads it may take integers as they lie, by Integer"
        raise HopTypeError(f"{who} has no exact dtype: {base.dtype.__name__}", help)
    try:
        T.dtype_of(dtypes[0])
    except TypeError as error:
        raise HopTypeError(f"{who}: {error}", "use an integer or floating-point dtype, or Bool") from None
    return str(dtypes[0])


def _shape(who: str, text: str, most: int | None = None) -> tuple[Expr, ...]:
    help = 'write dims such as "leaf+1 layer"'
    try:
        shape = parse_shape(text)
    except ValueError as error:
        raise HopTypeError(f"{who}: {error}", help) from error
    if any(name.startswith("_") for dim in shape for name in dim.names):
        raise HopTypeError(f"{who}: a dim of {text!r} has no name, so it can't be priced", help)
    if most is not None and len(shape) > most:
        raise HopTypeError(
            f"{who}: {text!r} has {len(shape)} dims, at most {most} is possible", "join them into one"
        )
    return shape


def _elements(base: Any) -> tuple[Any, ...]:
    """What a list, tuple or sequence is of."""
    many = typing.get_origin(base) in (list, tuple, collections.abc.Sequence)
    return typing.get_args(base) if many else ()


def _columns(use: str, base: Any) -> tuple[Port, ...]:
    """The columns that a fold's new rows carry: fields of the element type but `parents` and `tag`."""
    elements = _elements(base)
    if not elements or not hasattr(elements[0], "_fields"):
        raise HopTypeError(
            f"{use} emits rows as {base}", "annotate the port as a list of a NamedTuple, or of Row"
        )
    fields = typing.get_type_hints(elements[0], include_extras=True)
    names = [n for n in elements[0]._fields if n not in ("parents", "tag")]
    return tuple(read_port(use, n, fields[n], output=True) for n in names)
