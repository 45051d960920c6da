"""What stands under `engine:`, `learner:` and `with:`: checked against the options that exist, value by value."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from flowgraph.engines.registry import ENGINES
from flowgraph.errors import Diagnostic, ModelError, Place
from flowgraph.ir.graph import Owner
from flowgraph.learners.registry import LEARNERS
from flowgraph.models import facts
from flowgraph.spec.config import convert_value, is_callable
from flowgraph.spec.graphfile import HopDecl, OwnerDecl
from flowgraph.spec.hop import HopSpec, Param
from flowgraph.spec.reader import Reader, form_of, guess, lower_first, near, plural, shown, suggest
from flowgraph.spec.source import Located

# Of a value that is plainly text, a class of its own tells little; of anything else a user's code raises, much.
PLAIN = (ValueError, TypeError, ImportError)


def read_owner(decl: OwnerDecl, found: list[Diagnostic]) -> Owner:
    owner = Owner(decl.name, decl.place, decl.threads, ranks=decl.ranks)
    if decl.engine is not None:
        what = f"owners.{decl.name}.engine"
        owner.engine = _resource(decl.engine, what, ENGINES, found)
        if owner.engine is not None and decl.name == "driver":
            message = f"{what}: the driver has no event loop to serve requests on"
            found.append(
                Diagnostic("FG106", decl.engine.place, message, "give the engine an owner of its own")
            )
    if decl.learner is not None:
        what = f"owners.{decl.name}.learner"
        owner.learner = _resource(decl.learner, what, LEARNERS, found)
    return owner


def _resource(node: Located, what: str, known: Mapping[str, Any], found: list[Diagnostic]) -> Any:
    """The options of an engine or a learner; None when they have findings."""
    reader = Reader(node.place.file)
    given = node.value if isinstance(node.value, dict) else {}
    use = given.get("use")
    named = use.plain() if use is not None and not use.unread else None
    kind = known.get(named) if isinstance(named, str) else None
    if use is not None and kind is None and not use.unread:
        help = f"{near(str(named), tuple(known))}supported: {', '.join(known)}"
        reader.error("FG107", use.place, f"{what}: there is no {shown(use)}", help)
    kind = kind or next(iter(known.values()))
    needed = {"use": f"add use: {' or '.join(known)}"}
    needed |= {f.name: f"add {f.name}: to it" for f in msgspec.structs.fields(kind) if f.required}
    given = reader.record(node, what, ("use", *kind.__struct_fields__), needed).values
    types = typing.get_type_hints(kind, include_extras=True)
    for name, value in given.items():
        if name != "use":
            reader.convert(value, types[name], f"{what}.{name}", None)
    made = _made(reader, node, what, kind) if not reader.found and not node.unread and given else None
    found += reader.found
    return made


def _made(reader: Reader, node: Located, what: str, kind: Any) -> Any:
    try:
        options = msgspec.convert(node.plain(), kind)
        facts(options.model)
        return options
    except msgspec.ValidationError as error:
        place, name = _meant(str(error), node)
        said, _, fix = lower_first(error).partition("; ")
        reader.error("FG106", place, f"{what}: {said}", fix or f"change {name} of {what}")
    except (ModelError, OSError) as error:
        help = getattr(error, "help", "") or "name a model that is there"
        reader.error("FG113", node.value["model"].place, getattr(error, "message", str(error)), help)
    return None


def _meant(said: str, options: Located) -> tuple[Place, str]:
    """The place and the name of the given option that an error speaks of first; all of them, when it names none."""
    given: dict[str, Located] = options.value if isinstance(options.value, dict) else {}
    named = {name: re.search(rf"\b{re.escape(name)}\b", said) for name in given.keys() - {"use"}}
    at = {name: match.start() for name, match in named.items() if match}
    first = min(at, key=lambda name: (at[name], name), default=None)
    return (given[first].place, first) if first is not None else (options.place, "the options")


# --- with: -----------------------------------------------------------------------------------------------------


def read_config(decl: HopDecl, spec: HopSpec, found: list[Diagnostic]) -> dict[str, Any]:
    """The plain, serialisable values of `with:`, checked against the parameters of the hop."""
    reader = Reader(decl.place.file)
    config = decl.config or Located({}, decl.place)
    given: dict[str, Located] = config.value if isinstance(config.value, dict) else {}
    options = {p.name: p for p in spec.params if p.origin == "with"}
    meant = guess(given, options, [p.name for p in options.values() if p.required])
    made: dict[str, Any] = {}
    for name, node in given.items():
        if name not in options:
            message = f"hop {decl.name} ({decl.use}) has no option {name!r}"
            reader.error("FG111", config.keys[name], message, _instead(name, spec, meant, options))
        elif not node.unread:
            try:
                made[name] = convert_value(node.plain(), options[name].type)
            except Exception as error:  # it may import a user's module and call a user's factory
                message = f"hops.{decl.name}.with.{name}: {_said(error)}"
                place, help = _mended(name, options[name], node, error)
                reader.error("FG111", place, message, help)
    missing = [p.name for p in options.values() if p.required and p.name not in (*given, *meant.values())]
    if missing and "with" not in decl.partial:
        message = f"hop {decl.name} needs the option{plural(missing)} {', '.join(missing)}"
        help = f"add {', '.join(f'{name}:' for name in missing)} under with:"
        reader.error("FG111", decl.place, message, help)
    if (
        spec.facts.validate is not None
        and not reader.found
        and not config.unread
        and "with" not in decl.partial
    ):
        try:
            spec.facts.validate(**made)
        except Exception as error:  # a user's function
            found.append(refused(decl, error, options))
    found += reader.found
    return {name: node.plain() for name, node in given.items()}


def refused(
    decl: HopDecl, error: Exception, options: Mapping[str, Param] = MappingProxyType({})
) -> Diagnostic:
    """FG111: what a hop's own check says of its options, at the one that it names."""
    said = _said(error)
    place, name = _meant(said, decl.config or Located({}, decl.place))
    default = options[name].default if name in options and not options[name].required else None
    left_out = f", or leave it out for {default}" if isinstance(default, int | float | str) else ""
    return Diagnostic("FG111", place, f"hop {decl.name}: {said}", f"change {name} under with:{left_out}")


def _mended(name: str, option: Param, node: Located, error: Exception) -> tuple[Place, str]:
    """Place and help of an option that can't be made: of the one among a factory's that the error names."""
    use = node.plain().get("use") if isinstance(node.value, dict) else None
    if use is None or isinstance(error, ImportError):
        return node.place, _form(name, option)
    place, inner = _meant(str(error), node)
    return place, f"change {inner} under {name}; the docstring of {use} says what it takes"


def _form(name: str, option: Param) -> str:
    """What may be given for an option."""
    if is_callable(option.type):
        return f"give {name} the import path of a function, or {{use: path, …}} with what makes one"
    return f"write {form_of(option.type) or 'another value'} for {name}"


def _instead(name: str, spec: HopSpec, meant: dict[str, str], options: dict[str, Param]) -> str:
    fixed = next((p for p in spec.params if p.name == name), None)
    if fixed is None:
        return suggest(name, meant, "options", options)
    sources = {
        "dim": f"dims.{fixed.detail}",
        "run": f"run.{fixed.detail}",
        "seam": f"{fixed.fact} of the input {fixed.detail}",
        "resource": f"the {fixed.detail} of the hop's owner",
        "credit": "the room that training has",
    }
    return f"it comes from {sources[fixed.origin]}; set it there"


def _said(error: Exception) -> str:
    text = lower_first(error) if isinstance(error, msgspec.ValidationError) else str(error)
    return text if isinstance(error, PLAIN) and text else f"{type(error).__name__}: {text}".rstrip(": ")
