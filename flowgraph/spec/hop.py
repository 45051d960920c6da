"""A hop is a plain typed function: `@hop`, `@fold` and `@effect` only attach facts; signatures say the rest.

Positional parameters are input ports, keyword-only parameters are configuration or resources, and the return
annotation gives the output ports (a NamedTuple: one a field). `read_spec` turns a function into a HopSpec.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from flowgraph.engines.protocol import Engine
from flowgraph.errors import Place
from flowgraph.learners.protocol import Critic, Learner
from flowgraph.models.tokenizer import Tokenizer
from flowgraph.spec import types as T
from flowgraph.spec.facts import check_facts
from flowgraph.spec.folds import check_fold
from flowgraph.spec.ports import HopTypeError, Port, read_port

HopKind = Literal["hop", "fold", "effect"]
RESOURCES: dict[Any, str] = {
    Engine: "engine",
    Learner: "learner",
    Critic: "learner",
    Tokenizer: "tokenizer",
}
F = TypeVar("F", bound=Callable[..., Any])


class Facts(msgspec.Struct, frozen=True):
    """What a decorator says of its function; the signature says the rest.

    described: who does what the function only describes, "" for one that can be called
    """

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
    flight: Callable[..., int] | None = None
    admits: Callable[..., int] | None = None
    needs: tuple[tuple[str, str], ...] = ()
    read: tuple[str, ...] = ()
    trains: bool = False
    described: str = ""


class Param(msgspec.Struct, frozen=True):
    """One keyword-only parameter: where its value comes from, its type and its default."""

    name: str
    origin: Literal["with", "dim", "seam", "run", "credit", "resource"]
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

    @property
    def columns(self) -> tuple[Port, ...]:
        """What its rows carry: a fold's row columns, else the outputs that hold payload."""
        own: list[Port] = []
        for port in self.outputs:
            own += port.columns if port.kind == "rows" else [port] if port.kind != "value" else []
        return tuple(p for p in own if p.kind != "scalars")

    @property
    def trains(self) -> bool:
        """Whether it takes steps with its learner; who gives weights away does."""
        given = self.facts.uses == "learner" and any(p.kind == "tensors" for p in self.columns)
        return given or self.facts.trains


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
    needs: Mapping[str, str] | None = None,
    described: str = "",
) -> Callable[[F], F]:
    """Declare a pure function. `maps="leaf"`: the result is the same however the rows are split or batched.

    `validate(**config)` is called by the check with the hop's `with:` and raises ValueError for a bad one. Where it
    takes parameters that come from dims, a seam or the run it is called once more with these, so they have defaults
    there. `needs` as of `@fold`.
    `described="SGLang"`: the function has no body. It says what crosses where another system does the work, so that a
    graph with it is checked, drawn and audited, and not run.
    """
    return _attach(
        kind="hop",
        owner=owner,
        lifetime=lifetime,
        maps=maps,
        validate=validate,
        needs=tuple((needs or {}).items()),
        described=described,
    )


def fold(
    *,
    owner: str | None = "driver",
    lifetime: T.Lifetime = "firing",
    source: T.RowKind | None = None,
    expand: tuple[T.RowKind, T.RowKind] | None = None,
    collect: tuple[T.RowKind, T.RowKind] | None = None,
    validate: Callable[..., None] | None = None,
    room: Callable[..., int] | None = None,
    flight: Callable[..., int] | None = None,
    admits: Callable[..., int] | None = None,
    needs: Mapping[str, str] | None = None,
    read: Sequence[str] = (),
    described: str = "",
) -> Callable[[F], F]:
    """Declare `step(state, ports…) → decisions` over an explicit state that it alone may mutate.

    It fires when any input changes, or credit comes. At most one queue or event port holds a row, the others are None,
    so each is annotated `Row | None`; latest ports always hold their newest value, and a column is a mapping from the
    key of a row that its first port of rows shows, or that comes there, to the value. A change of rate is a `source`,
    an `expand` or a `collect`. `room(state)` says how many more queued rows it takes now (default: one more).

    Of a fold that makes trajectories, `flight()` says how many it lets be in flight at once, and `admits()` how many
    may be out in all: neither dropped nor accounted for in the version. The check proves from them how stale a row can
    be. All three get every keyword-only parameter as well.
    `needs={"option": "port"}`: the option, when it is on, reads this optional port; `{"option=value": "port"}`: when it
    is just that; `{"port": "port"}`: an optional port, when it is wired, says nothing without the other. `read` names
    columns that somebody must read. `described` as of `@hop`.
    """
    return _attach(
        kind="fold",
        owner=owner,
        lifetime=lifetime,
        source=source,
        expand=expand,
        collect=collect,
        validate=validate,
        room=room,
        flight=flight,
        admits=admits,
        needs=tuple((needs or {}).items()),
        read=tuple(read),
        described=described,
    )


def effect(
    *,
    uses: type[Any],
    owner: str | None = None,
    lifetime: T.Lifetime = "firing",
    maps: str | None = None,
    validate: Callable[..., None] | None = None,
    needs: Mapping[str, str] | None = None,
    trains: bool = False,
    described: str = "",
) -> Callable[[F], F]:
    """Declare a function that uses a resource (`Engine`, `Learner` or `Critic`); `async def` runs many firings at once.

    `needs` as of `@fold`, `described` as of `@hop`. `trains`: it takes steps with the learner; one that gives
    tensors does.
    """
    return _attach(
        kind="effect",
        uses=RESOURCES[uses],
        owner=owner,
        lifetime=lifetime,
        maps=maps,
        validate=validate,
        needs=tuple((needs or {}).items()),
        trains=trains,
        described=described,
    )


def _check_fires(use: str, inputs: list[Port]) -> None:
    """What is no fold fires once a row on its columns, or on one kind of event; it keeps no rows to choose from."""
    rows = [port.name for port in inputs if port.kind == "rows"]
    if rows:
        raise HopTypeError(
            f"{use} takes rows as {rows[0]}, and only a fold can", "read columns, or make it a fold"
        )
    events = [port.name for port in inputs if port.mode == "event"]
    if len(events) > 1 or (events and any(port.mode == "queue" for port in inputs)):
        message = f"{use} takes the event {events[-1]} beside other inputs, so it is not clear when it fires"
        raise HopTypeError(message, "take one event and nothing else, or columns only, or make it a fold")


def read_spec(use: str, function: Any) -> HopSpec:
    """Read ports, parameters and state off a decorated function. Raises HopTypeError naming what can't be read."""
    facts = getattr(function, "__flowgraph__", None)
    if not inspect.isroutine(inspect.unwrap(function)):
        what = "a class" if isinstance(function, type) else f"an object of type {type(function).__name__}"
        raise HopTypeError(
            f"{use} is no hop: it is {what}, and no function",
            "name a function that is decorated with @flowgraph.hop, @fold or @effect",
        )
    if not isinstance(facts, Facts):
        raise HopTypeError(f"{use} is no hop", "decorate the function with @flowgraph.hop, @fold or @effect")
    _check_facts(use, facts)
    hints = _hints(use, function)
    inputs: list[Port] = []
    params: list[Param] = []
    state = None
    is_fold = facts.kind == "fold"
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        if hint is None:
            raise HopTypeError(f"parameter {name} of {use} has no type", "annotate it")
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise HopTypeError(
                f"parameter {name} of {use} takes any number of values", "name every port and option"
            )
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            params.append(_param(name, hint, parameter.default))
        elif is_fold and state is None:
            state = hint
        else:
            port = read_port(use, name, hint, by_row=is_fold)
            inputs.append(
                msgspec.structs.replace(port, optional=parameter.default is not inspect.Parameter.empty)
            )
    if is_fold and state is None:
        raise HopTypeError(
            f"fold {use} has no state", "make the first parameter a msgspec.Struct that holds it"
        )
    outputs = [_as_version(p) if p.initial is not None else p for p in _outputs(use, hints.get("return"))]
    seams = {param.detail for param in params if param.fact == "max_lag"}
    inputs = [_as_version(port) if port.name in seams else port for port in inputs]
    if is_fold:
        check_fold(use, facts, state, inputs, outputs, hints)
    else:
        _check_fires(use, inputs)
    code = inspect.unwrap(function).__code__
    place = Place(_short(code.co_filename), code.co_firstlineno, 1)
    doc = inspect.getdoc(function) or ""
    spec = HopSpec(use, function, facts, tuple(inputs), tuple(outputs), tuple(params), state, place, doc)
    check_facts(spec)
    return spec


def _hints(use: str, function: Any) -> dict[str, Any]:
    """The annotations, evaluated; they may be any expression, and so raise anything."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        what = f"an annotation of {use} can't be read: {type(error).__name__}: {error}"
        raise HopTypeError(
            what, "import the name at the top of the module, not under TYPE_CHECKING"
        ) from error


def _check_facts(use: str, facts: Facts) -> None:
    """A decorator's words are what Facts says they are; nobody else looks before they are used."""
    if facts.lifetime not in T.LIFETIMES:
        raise HopTypeError(
            f"{use} has no lifetime {facts.lifetime!r}", f"write one of {', '.join(T.LIFETIMES)}"
        )
    for kind in (*(facts.expand or ()), *(facts.collect or ()), *([facts.source] if facts.source else ())):
        if kind not in T.ROW_KINDS:
            raise HopTypeError(f"{use} has no row kind {kind!r}", f"write one of {', '.join(T.ROW_KINDS)}")


def _as_version(port: Port) -> Port:
    """A number that is published from the start, or that a lag is counted from, is a version, whatever it is called."""
    if (port.kind, port.dtype) != ("value", int.__name__):
        return port
    return msgspec.structs.replace(port, dtype=T.Version.__name__, wider=(port.dtype,))


def _short(path: str) -> str:
    """The file from the package on, so that messages do not depend on where the package is installed."""
    parts = path.replace("\\", "/").split("/")
    for package in ("hops", "flowgraph"):
        if package in parts[:-1]:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    return parts[-1]


def _param(name: str, hint: Any, default: Any) -> Param:
    resource = next((text for kind, text in RESOURCES.items() if kind is hint), None)
    if resource is not None:
        return Param(name, "resource", hint, default, resource)
    for marker in getattr(hint, "__metadata__", ()):
        match marker:
            case T.Dim(name=detail):
                return Param(name, "dim", hint.__origin__, default, detail)
            case T.Seam(port=detail, fact=fact):
                return Param(name, "seam", hint.__origin__, default, detail, fact)
            case T.Run(name=detail):
                return Param(name, "run", hint.__origin__, default, detail)
            case T.Credit():
                return Param(name, "credit", hint.__origin__, default)
    return Param(name, "with", hint, default)


def _outputs(use: str, hint: Any) -> list[Port]:
    if hint is None:
        raise HopTypeError(f"{use} has no return type", "annotate what it returns")
    if hint is type(None):
        return []
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        fields = typing.get_type_hints(hint, include_extras=True)
        return [read_port(use, name, fields[name], output=True) for name in hint._fields]
    return [read_port(use, "out", hint, output=True)]
