"""Verify mode: a hop has no state that it does not declare. It is called twice, and nothing that it can reach changes.

Looked at are its inputs, its options, its defaults, the object that it is a method of, what it closes over, and the
globals that its code names, also through the functions of its module, and of the modules of functions among its
options. Modules and classes themselves are left out, and so is what functools.lru_cache keeps.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from flowgraph.errors import HiddenState
from flowgraph.runtime.fingerprint import fingerprint

Call = Callable[..., Any]
PASS_IT_IN = (
    "take it as an input or an option, or keep it in the state of a @fold; an @effect may keep what it likes"
)


def call(who: str, function: Call, values: Mapping[str, Any], resources: Collection[str] = ()) -> Any:
    """What a hop gives. who: its kind and name, for messages; resources: options that are not its own.

    Raises HiddenState naming what changed.
    """
    witness = _Witness(who, function, values, resources)
    first = function(**values)
    witness.nothing_changed()
    with witness.again():
        second = function(**values)
    witness.equal(first, second)
    return first


async def call_async(
    who: str, function: Call, values: Mapping[str, Any], resources: Collection[str] = ()
) -> Any:
    """`call` for an async hop."""
    witness = _Witness(who, function, values, resources)
    first = await function(**values)
    witness.nothing_changed()
    with witness.again():
        second = await function(**values)
    witness.equal(first, second)
    return first


def step(
    who: str, function: Call, state: Any, ports: Mapping[str, Any], resources: Collection[str] = ()
) -> Any:
    """What a fold decides. It may change its state, and makes of an equal one the same state and decisions."""
    try:
        twin = copy.deepcopy(state)
    except Exception as error:
        text = f"{who} has a state that can't be copied, so it can't be replayed: {type(error).__name__}: {error}"
        raise HiddenState(text, "keep plain values in it") from error
    witness = _Witness(who, function, ports, resources)
    first = function(state, **ports)
    witness.nothing_changed()
    with witness.again():
        second = function(twin, **ports)
    witness.equal(first, second)
    if fingerprint(state) != fingerprint(twin):
        raise _impure(who, "its state is another")
    return first


class _Witness:
    """What a function can reach, as it was before the call."""

    def __init__(
        self, who: str, function: Call, values: Mapping[str, Any], resources: Collection[str]
    ) -> None:
        self.who, self.function, self.values, self.resources = who, function, values, resources
        self.inputs, self.state = self._inputs(), self._state()

    def _inputs(self) -> dict[str, bytes]:
        return {name: fingerprint(value) for name, value in self.values.items()}

    def _state(self) -> dict[str, bytes]:
        return {what: fingerprint(value) for what, value in reach(self.function, self.resources)}

    def nothing_changed(self) -> None:
        inputs, state = self._inputs(), self._state()
        for name in (name for name, was in self.inputs.items() if inputs[name] != was):
            raise HiddenState(
                f"{self.who} changes what it reads: its input {name} is another after the call",
                f"copy {name} in the hop, and change the copy",
            )
        for what in state:
            if self.state.get(what) != state[what]:
                text = f"{self.who} keeps state that it does not declare: {what} changed while it ran"
                raise HiddenState(text, PASS_IT_IN)

    def again(self) -> _Again:
        return _Again(self.who)

    def equal(self, first: Any, second: Any) -> None:
        one, two = _outputs(first), _outputs(second)
        for name in one:
            if name not in two or fingerprint(one[name]) != fingerprint(two[name]):
                raise _impure(self.who, f"its output {name} differs")


class _Again:
    """A second call raises nothing that the first did not."""

    def __init__(self, who: str) -> None:
        self.who = who

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise _impure(self.who, f"it raises {type(error).__name__}: {error}") from error


def _impure(who: str, what: str) -> HiddenState:
    text = f"{who} is no function of what it reads: {what} when it is called again with the same"
    return HiddenState(text, "draw random numbers from a key that it reads, and take the time as an input")


def _outputs(result: Any) -> dict[str, Any]:
    return dict(result._asdict()) if hasattr(result, "_asdict") else {"out": result}


# --- what a function can reach ---------------------------------------------------------------------------------


def reach(function: Call, left_out: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """(what it is, its value) for all state that a function can reach. left_out: options that are not looked at."""
    waiting: list[Any] = [function]
    if isinstance(function, functools.partial):
        options = {name: value for name, value in function.keywords.items() if name not in left_out}
        yield from ((f"its option {name}", value) for name, value in options.items())
        waiting = [function.func, *(value for value in options.values() if callable(value))]
    if isinstance(waiting[0], types.MethodType):
        yield f"the object that {waiting[0].__name__} is a method of", waiting[0].__self__
    homes = {_home(one) for one in waiting}
    seen: set[int] = set()
    while waiting:
        one = _code_of(waiting.pop())
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        # Of a library's function, only what it was given is of interest: it may be a decorator.
        for what, value in _around(one) if _home(one) in homes else _given(one):
            if not isinstance(value, types.ModuleType | type):
                yield what, value
                waiting += [value] if callable(value) else []


def _code_of(value: Any) -> types.FunctionType | None:
    """The function that runs when a value is called; None for classes, and for what is not written in Python."""
    while not isinstance(value, types.FunctionType):
        if isinstance(value, type):
            return None
        inner = inspect.getattr_static(value, "__wrapped__", None)  # of functools.lru_cache
        if isinstance(value, functools.partial):
            inner = value.func
        elif isinstance(value, types.MethodType):
            inner = value.__func__
        elif inner is None:
            inner = inspect.getattr_static(type(value), "__call__", None)
            return inner if isinstance(inner, types.FunctionType) else None
        value = inner
    return value


def _home(value: Any) -> str:
    """The module in which the code behind a function was written, whatever it is wrapped in."""
    while (code := _code_of(value)) is not None and (inner := vars(code).get("__wrapped__")) is not None:
        value = inner
    return str(code.__globals__.get("__name__", "")) if code is not None else ""


def _given(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over."""
    name, code = function.__qualname__, function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            yield f"`{variable}`, which {name} closes over,", cell.cell_contents


def _around(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function has beside its arguments, and what it does not define itself."""
    yield from _given(function)
    name, code = function.__qualname__, function.__code__
    for at, value in enumerate(function.__defaults__ or ()):
        parameter = code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) + at]
        yield f"the default of `{parameter}` of {name}", value
    for parameter, value in (function.__kwdefaults__ or {}).items():
        yield f"the default of `{parameter}` of {name}", value
    for attribute, value in vars(function).items():
        yield f"the attribute `{attribute}` of {name}", value
    for variable in _globals(code):
        if variable in function.__globals__:
            yield f"the global `{variable}` of {_home(function)}", function.__globals__[variable]


@functools.lru_cache(maxsize=4096)
def _globals(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code reads or writes, also in the functions that it defines."""
    found = {i.argval: None for i in dis.get_instructions(code) if i.opname.endswith("_GLOBAL")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= dict.fromkeys(_globals(inner))
    return tuple(found)
