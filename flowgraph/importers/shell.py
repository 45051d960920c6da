"""Example scripts of other systems, read and never run: variables, arrays, and the words of the command that counts.

What bash would have to be asked for (`$(…)`, a variable of the environment) stays as it is written, and is told of.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec

SUM = re.compile(r"\$\(\((?:[^()]|\([^()]*\))*\)\)")
VARIABLE = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\{(?P<name>\w+)(?::?-(?P<default>[^{}]*))?\}|\$(?P<bare>\w+)"
)
ASSIGNMENT = re.compile(
    r"\s*(?:export\s+|local\s+|readonly\s+)?(?P<name>\w+)(?P<more>\+?)=(?P<value>.*)$", re.S
)
ARRAY = re.compile(r"\"?\$\{(?P<name>\w+)\[@\]\}\"?")
SOURCE = re.compile(r"\s*(?:source|\.)\s+(?P<path>.+)$")
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


class Script(msgspec.Struct):
    """words: of the command, behind its marker, expanded; marker: what it was found by; unread: what could not be"""

    words: list[str] = []
    marker: str = ""
    unread: list[str] = []


class _State(msgspec.Struct):
    folder: Path
    values: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    unread: list[str] = []


def read_script(path: Path, markers: tuple[str, ...]) -> Script:
    """The command of a script that has one of the markers among its words. Raises ValueError when none has."""
    state = _State(path.parent)
    found: Script | None = None
    for line in _lines(path, state):
        words = _split(line)
        at = next((i for i, word in enumerate(words) if word.endswith(markers)), None)
        if at is not None:
            expanded = [one for word in words[at + 1 :] for one in _words(word, state)]
            found = Script([w for w in expanded if w not in ("$@", "2>&1")], words[at])
    if found is None:
        raise ValueError(
            f"{path}: no command in it runs {' or '.join(markers)}; give the script that starts the run"
        )
    found.words = _without_pipes(found.words)
    found.unread = list(dict.fromkeys(state.unread))
    return found


def _lines(path: Path, state: _State, depth: int = 0) -> list[str]:
    """Whole commands, in order; assignments and arrays are noted on the way, and what is sourced is read."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    out: list[str] = []
    lines = iter(text.split("\n"))
    for raw in lines:
        # Arithmetic first: it may hold blanks, at which a line is split.
        line = SUM.sub(lambda found: expand(found[0], state.values, state.unread).replace(" ", ""), raw)
        begun = re.match(r"\s*(\w+)(\+?)=\((.*)$", line)
        if begun:
            _array(begun, lines, state)
            continue
        sourced, assigned = SOURCE.match(line), ASSIGNMENT.match(line)
        if sourced and depth < 4:
            name = "".join(_words(_first(sourced["path"]), state))
            file = Path(name) if Path(name).is_absolute() else state.folder / name
            if file.is_file():
                out += _lines(file, state, depth + 1)
            else:
                state.unread.append(line.strip())
        elif assigned and not line.lstrip().startswith("#"):
            _assign(assigned, path, state)
        else:
            out.append(line)
    return out


def _array(begun: re.Match[str], lines: object, state: _State) -> None:
    name, more, rest = begun[1], begun[2], begun[3]
    body = []
    while True:
        words = _split(rest)
        closed = bool(words) and words[-1].endswith(")") and "$(" not in words[-1]
        if closed:
            words[-1] = words[-1][:-1]
        body += [w for w in words if w]
        nexts = None if closed else next(lines, None)  # type: ignore[call-overload]
        if nexts is None:
            break
        rest = nexts
    values = [one for word in body for one in _words(word, state)]
    state.arrays[name] = [*state.arrays.get(name, []), *values] if more else values


def _assign(found: re.Match[str], path: Path, state: _State) -> None:
    name, value = found["name"], _first(found["value"])
    if "BASH_SOURCE" in found["value"] or "dirname" in found["value"]:
        state.values[name] = str(path.parent)
    elif "$(" in found["value"].replace("$((", "") or "`" in found["value"]:
        state.values.pop(name, None)  # what a command prints
    else:
        state.values[name] = expand(value, state.values, state.unread)


def _first(text: str) -> str:
    words = _split(text)
    return words[0] if words else ""


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that ends on another line
        return []


def _words(word: str, state: _State) -> list[str]:
    array = ARRAY.fullmatch(word)
    if array is not None:
        if array["name"] not in state.arrays:
            state.unread.append(word)
        return state.arrays.get(array["name"], [])
    return [expand(word, state.values, state.unread)]


def expand(text: str, values: dict[str, str], unread: list[str], depth: int = 0) -> str:
    """A word with its variables. unread: takes what has no value here."""

    def one(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            total = _sum(match["sum"], values)
            if total is None:
                unread.append(match[0])
            return match[0] if total is None else str(total)
        name = match["name"] or match["bare"]
        if name in values:
            return values[name]
        if match["default"] is not None:
            return expand(match["default"], values, unread, depth + 1) if depth < 8 else match["default"]
        unread.append(match[0])
        return match[0]

    return VARIABLE.sub(one, text)


def _sum(text: str, values: dict[str, str]) -> int | None:
    """The value of whole-number arithmetic, with variables named with or without $."""
    plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
    try:
        return _value(ast.parse(plain.strip(), mode="eval").body, values)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None


def _value(node: ast.expr, values: dict[str, str]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(values[name])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left, values), _value(right, values))
    raise ValueError("no whole-number arithmetic")


def _without_pipes(words: list[str]) -> list[str]:
    """The words of the command alone: without what its output goes to."""
    end = next(
        (
            i
            for i, w in enumerate(words)
            if w in ("|", ">", ">>", "&", ";", "&&") or w.startswith((">", "2>"))
        ),
        None,
    )
    return words[:end]
