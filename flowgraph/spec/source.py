"""YAML with positions: every value knows the file, line and column that it was written at.

PyYAML's `compose()` gives nodes with marks; this turns them into `Located` trees and refuses what YAML 1.1
reads in a way that nobody meant (`no`, `1:30`, `2026-01-01`, duplicate keys), and what would give one value
two places (aliases, merge keys).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import msgspec
import yaml
from yaml.composer import Composer

from flowgraph.errors import Diagnostic, Place

FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
INT = re.compile(r"[-+]?(0|[1-9]\d*)")
DIGITS = 300  # a longer number is no number that anyone wrote; Python refuses to read one of more than 4300
ALIAS = "!alias"
READ_AS = {
    "bool": "a truth value",
    "int": "a number in another base",
    "float": "a number in base 60",
    "timestamp": "a date",
}


class Located(msgspec.Struct):
    """A value with its place. `value` is a scalar, a list of Located, or a dict of name → Located.

    partial: it, or one of its keys, could not be read and has a finding, so that what it lacks is no finding of its own
    """

    value: Any
    place: Place
    keys: dict[str, Place] = {}
    partial: bool = False

    @property
    def unread(self) -> bool:
        """Whether any part of the value could not be read."""
        parts = self.value.values() if isinstance(self.value, dict) else self.value
        return self.partial or (isinstance(self.value, dict | list) and any(part.unread for part in parts))

    def plain(self) -> Any:
        """The value without positions."""
        if isinstance(self.value, dict):
            return {k: v.plain() for k, v in self.value.items()}
        if isinstance(self.value, list):
            return [v.plain() for v in self.value]
        return self.value


class _Composer(Composer):
    """Composes an alias as a marked scalar, so that it gets a finding at its own place and can't recurse."""

    check_event: Callable[..., bool]  # of the parser that a loader adds
    get_event: Callable[[], Any]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            return yaml.ScalarNode(ALIAS, event.anchor, event.start_mark, event.end_mark)
        return super().compose_node(parent, index)


class _Loader(_Composer, yaml.SafeLoader):
    """All of it in Python: what it says of broken YAML names what was expected and what was found."""


def _compose(text: str) -> yaml.Node | None:
    """The tree of nodes, parsed in C where PyYAML has that; what C refuses is read again, for the better message."""
    if yaml.__with_libyaml__:
        with contextlib.suppress(yaml.YAMLError, UnicodeError):
            return yaml.compose(text, Loader=_fast_loader())
    return yaml.compose(text, Loader=_Loader)


@functools.cache
def _fast_loader() -> Any:
    class Loader(_Composer, yaml.CSafeLoader):
        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            Composer.__init__(self)

    return Loader


def read(file: str, text: str) -> tuple[Located | None, list[Diagnostic]]:
    """Parse one document. Returns the tree (None when it can't be read) and all findings."""
    found: list[Diagnostic] = []
    try:
        node = _compose(text)
        root = _locate(file, node, found) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.context_mark is not None and mark is not None and mark.line >= len(text.splitlines()):
            mark = error.context_mark  # what was never closed, rather than the end of the file
        place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1, 1)
        problem = ", ".join(part for part in (error.context, error.problem) if part) or "can't be read"
        help = "mend it at the caret, or in the line above, where a brace, a quote or a comma may be missing"
        return None, [Diagnostic("FG101", place, f"invalid YAML: {problem}", help)]
    except yaml.reader.ReaderError as error:
        lines = (text[: error.position] + "?").splitlines()
        message = f"invalid YAML: the character U+{ord(text[error.position]):04X} is not allowed"
        return None, [
            Diagnostic(
                "FG101", Place(file, len(lines), len(lines[-1])), message, "remove it, or write an escape"
            )
        ]
    except RecursionError:
        return None, [Diagnostic("FG101", Place(file, 1, 1), "the file is nested too deeply", "unfold it")]
    if root is None:
        help = "write a graph; `flowgraph init` makes one"
        return None, [Diagnostic("FG101", Place(file, 1, 1), "the file is empty", help)]
    return root, found


def _place(file: str, node: yaml.Node) -> Place:
    start, end = node.start_mark, node.end_mark
    width = end.column - start.column if end.line == start.line else 1
    return Place(file, start.line + 1, start.column + 1, max(1, width))


def _locate(file: str, node: Any, found: list[Diagnostic]) -> Located:
    place = _place(file, node)
    if isinstance(node, yaml.ScalarNode):
        before = len(found)
        return Located(_scalar(node, place, found), place, partial=len(found) > before)
    if isinstance(node, yaml.SequenceNode):
        return Located([_locate(file, item, found) for item in node.value], place)
    out = Located({}, place)
    for key, value in node.value:
        at = _place(file, key)
        before = len(found)
        if not isinstance(key, yaml.ScalarNode) or key.tag == ALIAS or key.tag.endswith(":merge"):
            found.append(Diagnostic("FG102", at, "a key must be a plain name", "write the keys out"))
            out.partial = True
            continue
        _scalar(key, at, found)
        out.partial |= len(found) > before
        inner = _locate(file, value, found)
        if node.flow_style and isinstance(value, yaml.ScalarNode) and value.value == "" and not value.style:
            end = key.end_mark  # nothing stands behind the colon, and not, as in C, before what comes next
            inner.place = Place(file, end.line + 1, end.column + 2)
        if key.value in out.value:
            help = f"remove one of them; the first is on line {out.keys[key.value].line}"
            found.append(Diagnostic("FG103", at, f"duplicate key {key.value!r}", help))
            if out.value[key.value].value is not None:
                continue
        out.value[key.value] = inner
        out.keys.setdefault(key.value, at)
    return out


def _scalar(node: yaml.ScalarNode, place: Place, found: list[Diagnostic]) -> Any:
    text, tag = str(node.value), node.tag.rsplit(":", 1)[-1]
    if node.tag == ALIAS:
        found.append(Diagnostic("FG102", place, f"the alias *{text} is not followed", "write the value out"))
    elif node.style or tag == "str":  # a plain scalar has the style None, or "" in C
        # YAML 1.1 takes 1e-5 for text because it has no dot; nobody means that.
        if node.style or not FLOAT.fullmatch(text):
            return text
        return _number(float(text), text, place, found)
    elif tag == "null":
        return None
    elif tag == "bool" and text in ("true", "false"):
        return text == "true"
    elif tag == "int" and INT.fullmatch(text) and len(text) <= DIGITS:
        return int(text)
    elif tag in ("float", "int") and FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0\d+", text):
        return _number(float(text), text, place, found)
    elif tag == "float" and text.lower().lstrip("+-.") in ("inf", "nan"):
        return _number(float("nan"), text, place, found)
    else:
        help = f'quote it if text is meant: "{text[:40]}"' + (
            "; or write true or false" if tag == "bool" else ""
        )
        kind = READ_AS.get(tag, f"a {tag}")
        found.append(
            Diagnostic("FG102", place, f"YAML 1.1 reads {text[:40]} as {kind}, which is rarely meant", help)
        )
    return text


def _number(value: float, text: str, place: Place, found: list[Diagnostic]) -> float:
    """A finite number; JSON, and so the plan, has no other."""
    if value - value == 0:
        return value
    found.append(Diagnostic("FG102", place, f"{text[:40]} is no finite number", "write a finite number"))
    return 0.0


# --- overrides -------------------------------------------------------------------------------------------------

OPTION = "--set"  # the file that the places of overrides are in
SEGMENT = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^.="']+?))\s*([.=])""")


def split_path(assignment: str) -> tuple[list[str], int] | None:
    """`a."b.c".d=value` → the names, and where the value starts. None when it is no path=value."""
    names: list[str] = []
    at = 0
    while match := SEGMENT.match(assignment, at):
        names.append(next(g for g in match.groups()[:3] if g is not None))
        at = match.end()
        if match.group(4) == "=":
            return (names, at) if all(names) else None
    return None


def set_path(root: Located, assignment: str, line: int = 1) -> list[Diagnostic]:
    """Apply one `--set path=value` in place; the value is read as YAML. Returns the findings.

    A name with a dot or an equals sign is quoted. Places have the file `--set` and the number of the option as line.
    """
    path = split_path(assignment)
    place = Place(OPTION, line, 1, max(1, len(assignment)))
    if path is None:
        return [
            Diagnostic("FG105", place, f"{assignment!r} is no path=value", "write e.g. --set run.steps=10")
        ]
    names, start = path
    # Padding puts every mark of the value where it stands in the option.
    text = assignment[start:]
    node, found = read(OPTION, "\n" * (line - 1) + " " * start + (text if text.strip() else '""'))
    if node is None:
        return found
    key = Place(OPTION, line, 1, max(1, start - 1))
    at = root
    for i, name in enumerate(names):
        if at.value is None:
            at.value = {}
        if not isinstance(at.value, dict):
            outer = ".".join(names[:i]) or "the graph"
            message = f"{name} in {assignment[: start - 1]} is inside a plain value"
            return [*found, Diagnostic("FG106", key, message, f"set the whole of {outer} instead")]
        if i == len(names) - 1:
            at.value[name] = node
        at.keys.setdefault(name, key)
        at = at.value.setdefault(name, Located({}, key))
    return found
