"""Import paths and `with:` values: what a graph names by text, as Python objects."""

from __future__ import annotations

import collections.abc
import contextlib
import importlib
import inspect
import sys
import types
import typing
from typing import Any

import msgspec

from flowgraph.spec.hop import HopSpec
from flowgraph.spec.reader import near


def import_object(path: str) -> Any:
    """The object at a dotted import path. Raises ImportError that says how far it got, or what the module raises."""
    module, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in path.split(".")) or not module:
        raise ImportError(f"{path!r} is no import path")
    with contextlib.redirect_stdout(sys.stderr):  # a module that prints must not spoil what --json prints
        try:
            owner = importlib.import_module(module)
        except SystemExit as error:
            raise ImportError(f"module {module} exits when it is imported") from error
    if not hasattr(owner, name):
        known = [n for n in dir(owner) if not n.startswith("_")]
        raise ImportError(f"module {module} has no {name!r}; {near(name, known)}".rstrip("; "))
    return getattr(owner, name)


def build_config(spec: HopSpec, values: dict[str, Any]) -> dict[str, Any]:
    """`with:` values as the hop's own Python types: import paths become objects."""
    wanted = {p.name: p.type for p in spec.params if p.origin == "with"}
    return {name: convert_value(value, wanted[name]) for name, value in values.items()}


def is_callable(wanted: Any) -> bool:
    """Whether an option is a function, or one that may be left out."""
    return any(
        (typing.get_origin(a) or a) is collections.abc.Callable for a in (wanted, *typing.get_args(wanted))
    )


def convert_value(value: Any, wanted: Any) -> Any:
    """A plain value as `wanted`. For a callable: an import path, or {use: path, …} for a factory and its arguments."""
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(wanted) if a is not type(None)]
        if len(rest) == 1:
            return None if value is None else convert_value(value, rest[0])
    if (typing.get_origin(wanted) or wanted) is not collections.abc.Callable:
        return msgspec.convert(value, wanted)
    if isinstance(value, str):
        made = import_object(value)
    elif isinstance(value, dict) and isinstance(value.get("use"), str):
        made = _made(value["use"], {k: v for k, v in value.items() if k != "use"})
    else:
        raise TypeError(f"{value!r} is no import path and no mapping with `use:`")
    if not callable(made):
        raise TypeError(f"{value!r} is not callable")
    return made


def _made(path: str, options: dict[str, Any]) -> Any:
    """What a factory makes. Raises TypeError with the options that it has for one that it has not."""
    factory = import_object(path)
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # no function, or one whose signature can't be read: it speaks for itself
        return factory(**options)
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for name in (name for name in options if name not in known):
            raise TypeError(f"{path} has no option {name!r}; {near(name, known)}it has {', '.join(known)}")
    return factory(**options)
