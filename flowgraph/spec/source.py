"""YAML with positions: every value knows the file, line and column that it was written at.

PyYAML's `compose()` gives nodes with marks; this turns them into `Located` trees and refuses what YAML 1.1
reads in a way that nobody meant (`no`, `1:30`, `2026-01-01`, duplicate keys).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import yaml

from flowgraph.errors import Diagnostic, Place

FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
INT = re.compile(r"[-+]?\d+")


class Located(msgspec.Struct):
    """A value with its place. `value` is a scalar, a list of Located, or a dict of name → Located."""

    value: Any
    place: Place
    keys: dict[str, Place] = {}

    def plain(self) -> Any:
        """The value without positions."""
        if isinstance(self.value, dict):
            return {k: v.plain() for k, v in self.value.items()}
        if isinstance(self.value, list):
            return [v.plain() for v in self.value]
        return self.value


def read(file: str, text: str) -> tuple[Located | None, list[Diagnostic]]:
    """Parse one document. Returns the tree (None when it can't be read) and all findings."""
    found: list[Diagnostic] = []
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1, 1)
        problem = error.problem or error.context or "can't be read"
        return None, [Diagnostic("FG101", place, f"invalid YAML: {problem}", "mend the syntax at the caret")]
    except yaml.YAMLError as error:
        message = str(error).splitlines()[0]
        return None, [Diagnostic("FG101", Place(file, 1, 1), f"invalid YAML: {message}", "save the file as UTF-8 text")]
    if node is None:
        return None, [Diagnostic("FG101", Place(file, 1, 1), "the file is empty", "write a graph; `flowgraph init` makes one")]
    return _locate(file, node, found), found


def _place(file: str, node: Any) -> Place:
    start, end = node.start_mark, node.end_mark
    width = end.column - start.column if end.line == start.line else 1
    return Place(file, start.line + 1, start.column + 1, max(1, width))


def _locate(file: str, node: Any, found: list[Diagnostic]) -> Located:
    place = _place(file, node)
    if isinstance(node, yaml.ScalarNode):
        return Located(_scalar(node, place, found), place)
    if isinstance(node, yaml.SequenceNode):
        return Located([_locate(file, item, found) for item in node.value], place)
    values: dict[str, Located] = {}
    keys: dict[str, Place] = {}
    for key, value in node.value:
        at = _place(file, key)
        if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
            found.append(Diagnostic("FG102", at, "a key must be a plain name", "write the keys out"))
            continue
        _scalar(key, at, found)
        if key.value in values:
            help = f"remove one of them; the first is on line {keys[key.value].line}"
            found.append(Diagnostic("FG103", at, f"duplicate key {key.value!r}", help))
            continue
        values[key.value] = _locate(file, value, found)
        keys[key.value] = at
    return Located(values, place, keys)


def _scalar(node: Any, place: Place, found: list[Diagnostic]) -> Any:
    text, tag = node.value, node.tag.rsplit(":", 1)[-1]
    if node.style is not None or tag == "str":
        # YAML 1.1 takes 1e-5 for text because it has no dot; nobody means that.
        return float(text) if node.style is None and FLOAT.fullmatch(text) else text
    if tag == "null":
        return None
    if tag == "bool" and text in ("true", "false"):
        return text == "true"
    if tag == "int" and INT.fullmatch(text) and (len(text.lstrip("+-")) == 1 or not text.lstrip("+-").startswith("0")):
        return int(text)
    if tag in ("float", "int") and FLOAT.fullmatch(text):
        return float(text)
    if tag == "float" and text.lower().lstrip("+-.") in ("inf", "nan"):
        return float(text.lower().replace(".", ""))
    help = f'quote it if text is meant: "{text}"' + ("; or write true or false" if tag == "bool" else "")
    found.append(Diagnostic("FG102", place, f"YAML 1.1 reads {text} as a {tag}, which is rarely meant", help))
    return text


def set_path(root: Located, assignment: str) -> Diagnostic | None:
    """Apply one `--set path=value` in place; the value is read as YAML. Returns a finding when it can't."""
    place = Place("--set", 1, 1, len(assignment))
    path, separator, text = assignment.partition("=")
    if not separator or not all(path.split(".")):
        return Diagnostic("FG105", place, f"{assignment!r} is no path=value", "write e.g. --set run.steps=10")
    node, found = read("--set", text if text.strip() else '""')
    if node is None or found:
        return msgspec.structs.replace(found[0], place=place)
    _move(node, Place("--set", 1, len(path) + 2, max(1, len(text))))
    at = root
    *parents, last = path.split(".")
    for name in parents:
        if not isinstance(at.value, dict):
            return Diagnostic("FG106", place, f"{name} in {path} is inside a plain value", "set the whole value instead")
        if name not in at.value:
            at.value[name] = Located({}, place)
            at.keys[name] = place
        at = at.value[name]
    if not isinstance(at.value, dict):
        return Diagnostic("FG106", place, f"{last} in {path} is inside a plain value", "set the whole value instead")
    at.value[last] = node
    at.keys[last] = place
    return None


def _move(node: Located, place: Place) -> None:
    """Values of `--set` have the place of the option, not of the text inside it."""
    node.place = place
    for child in node.value.values() if isinstance(node.value, dict) else node.value if isinstance(node.value, list) else ():
        _move(child, place)
    node.keys = dict.fromkeys(node.keys, place)
