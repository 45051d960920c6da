"""Taking a Located tree apart: every method says what it wanted, and reports what it got instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from flowgraph.errors import Diagnostic, Place
from flowgraph.spec.source import Located


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def near(word: str, known: Iterable[str]) -> str:
    """`did you mean x? ` when one of the known names is near, else nothing."""
    match = closest(word, known)
    return f"did you mean {match}? " if match else ""


def misspelt(name: str, given: Iterable[str], known: Iterable[str]) -> bool:
    """Whether a given name that is unknown was probably meant as `name`; its own finding says so."""
    known = list(known)
    return any(g not in known and closest(g, known) == name for g in given)


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
        if not isinstance(node.value, dict):
            help = f"write {what} as `key: value` lines"
            self.error("FG106", node.place, f"{what} must be a mapping, not {shown(node)}", help)
            return {}, False
        return node.value, not node.partial

    def record(self, node: Located, what: str, keys: Iterable[str]) -> dict[str, Located] | None:
        """A mapping of known keys; others are reported and left out. None when it is something else."""
        values, whole = self.section(node, what)
        if not whole and not isinstance(node.value, dict):
            return None
        allowed = tuple(keys)
        for name in values:
            if name not in allowed:
                help = f"{near(name, allowed)}keys here: {', '.join(allowed)}"
                self.error("FG104", node.keys.get(name, node.place), f"unknown key {name!r} in {what}", help)
        return {k: v for k, v in values.items() if k in allowed}

    def lacks(self, node: Located, key: str, known: Iterable[str]) -> bool:
        """Whether a key is missing, and neither unreadable nor misspelt."""
        given = node.value if isinstance(node.value, dict) else {}
        return key not in given and not node.partial and not misspelt(key, given, known)

    def convert(self, node: Located, kind: Any, what: str, default: Any) -> Any:
        """The value as `kind`, or a finding and `default`."""
        try:
            return msgspec.convert(node.plain(), kind, strict=True)
        except msgspec.ValidationError as error:
            self.error("FG106", node.place, f"{what}: {lower_first(error)}", f"mend the value of {what}")
            return default


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
