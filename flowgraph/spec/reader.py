"""Taking a Located tree apart: every method says what it wanted, and reports what it got instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import msgspec
from msgspec import inspect

from flowgraph.errors import Diagnostic, Place
from flowgraph.spec.source import Located


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that was probably meant."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def surely(word: str, known: Iterable[str]) -> str | None:
    """The known name that was almost certainly meant, so that the rest can be checked as if it stood there."""
    return closest(word, known, cutoff=0.75)


def near(word: str, known: Iterable[str]) -> str:
    """`did you mean x? ` when one of the known names is near, else nothing."""
    match = closest(word, known)
    return f"did you mean {match}? " if match else ""


def guess(given: Iterable[str], known: Iterable[str], needed: Iterable[str] = ()) -> dict[str, str]:
    """Unknown given name → what was probably meant: the nearest that is not given, else the one that is missing."""
    given, known = list(given), list(known)
    meant: dict[str, str] = {}
    unknown = [name for name in given if name not in known]
    for name in unknown:
        match = closest(name, [k for k in known if k not in given and k not in meant.values()])
        if match is not None:
            meant[name] = match
    rest = [name for name in unknown if name not in meant]
    missing = [name for name in needed if name not in given and name not in meant.values()]
    return meant | ({rest[0]: missing[0]} if len(rest) == len(missing) == 1 else {})


def suggest(name: str, meant: Mapping[str, str], what: str, known: Iterable[str]) -> str:
    """The help line for an unknown name."""
    known = list(known)
    hint = f"did you mean {meant[name]}? " if name in meant else near(name, known)
    return f"{hint}{what}: {', '.join(known) or 'none'}"


class Record(msgspec.Struct):
    """A mapping of known keys, as far as it could be read. unsure: known keys that may be there under another name."""

    values: dict[str, Located]
    unsure: frozenset[str] = frozenset()


class Reader:
    """Collects the findings of one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Diagnostic] = []

    def error(self, code: str, place: Place, message: str, help: str) -> None:
        self.found.append(Diagnostic(code, place, message, help))

    def section(self, node: Located | None, what: str) -> tuple[dict[str, Located], bool]:
        """A mapping of any keys, and whether all of it could be read. Nothing at all is an empty mapping."""
        if node is None or node.value is None:
            return {}, True
        if isinstance(node.value, dict):
            return node.value, not node.partial
        if not node.unread:
            help = f"write {what} as `key: value` lines"
            self.error("FG106", node.place, f"{what} must be a mapping, not {shown(node)}", help)
        return {}, False

    def record(
        self,
        node: Located,
        what: str,
        keys: Iterable[str],
        needed: Mapping[str, str] | None = None,
        at: Place | None = None,
    ) -> Record:
        """A mapping of known keys. Others are reported and left out; so are needed ones (key → help) that it lacks."""
        keys, needed = tuple(keys), needed or {}
        values, whole = self.section(node, what)
        if not whole and not values:
            return Record({}, frozenset(keys))
        meant = guess(values, keys, needed)
        unknown = [name for name in values if name not in keys]
        for name in unknown:
            help = suggest(name, meant, "keys here", keys)
            self.error("FG104", node.keys.get(name, node.place), f"unknown key {name!r} in {what}", help)
        for key, help in needed.items():
            if whole and key not in values and key not in meant.values():
                self.error("FG105", at or node.place, f"{what} has no `{key}`", help)
        unsure = meant.values() if whole and len(meant) == len(unknown) else keys
        return Record({k: v for k, v in values.items() if k in keys}, frozenset(unsure) - values.keys())

    def convert(self, node: Located, kind: Any, what: str, default: Any, help: str = "") -> Any:
        """The value as `kind`, or a finding and `default`."""
        if node.unread:
            return default
        try:
            return msgspec.convert(node.plain(), kind, strict=True)
        except msgspec.ValidationError as error:
            help = help or f"write {form_of(kind) or 'another value'} for {what}"
            self.error("FG106", node.place, f"{what}: {lower_first(error)}", help)
            return default


def form_of(kind: Any) -> str:
    """What is written for a value of a type, in words: `a whole number of at least 1`; "" where words don't help."""
    try:
        return _form(inspect.type_info(kind))
    except TypeError:
        return ""


def _form(info: inspect.Type) -> str:
    match info:
        case inspect.UnionType(types=types):
            forms = [_form(one) for one in types if not isinstance(one, inspect.NoneType)]
            return " or ".join(forms) if all(forms) else ""
        case inspect.IntType(ge=least):
            return "a whole number" + (f" of at least {least}" if least is not None else "")
        case inspect.FloatType(ge=least):
            return "a number" + (f" of at least {least:g}" if least is not None else "")
        case inspect.LiteralType(values=values):
            return " or ".join(map(str, values))
        case inspect.StructType(fields=fields):
            return f"a mapping of {' and '.join(field.encode_name for field in fields)}"
        case inspect.ListType(item_type=item):
            return "a list" + (f", each {_form(item)}" if _form(item) else "")
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
    return ""


def lower_first(error: object) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]


def shown(node: Located) -> str:
    """A value for a message: short, and as YAML names it."""
    if node.value is None:
        return "nothing"
    if isinstance(node.value, dict | list):
        return "a mapping" if isinstance(node.value, dict) else "a list"
    text = repr(node.value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def plural(items: Sized) -> str:
    return "" if len(items) == 1 else "s"
