"""Graph files with one thing wrong: a seeded stream of edits to a good one, as a person might make them by accident."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

ODD = [
    *(None, True, -1, 0, 10**30, 2**31, 1e-5, 3.5, "", "no such thing", "no", "é 漢字 \u0301", "x" * 5000),
    *(
        "a.b.c",
        ".",
        "batch.tokens.x",
        "os.path.join",
        {"use": "hops.loss.policy_gradient"},
        {"from": "batch"},
    ),
    *([], [1, [2]], {}, {"a": {"b": None}}),
]

RAW = [
    *(
        "no",
        "1:30",
        "010",
        ".inf",
        "-.nan",
        "2026-01-01",
        "1_000",
        "0x1F",
        "1e999",
        "=",
        "~",
        "!x y",
        "!!int x",
    ),
    *("*alias", "&a [*a]", "!!python/name:os.system x", "<<: {a: 1}", "- a", "a: b: c"),
    *("{", "]", "'", '"', "|", "%", "@", "?", "\t", "\u2028", "\x07"),
]

Tree = Any
Path = tuple[Any, ...]


def mutants(text: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """(what was done, the file) for `count` edits of a graph file; the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        edit = rng.choice([drop, rename, replace, misdirect, duplicate, swap, raw, indent, cut, type_over])
        name, out = edit.__name__, edit(text, rng)
        if rng.random() < 0.3:
            again = rng.choice([raw, indent, cut, type_over])
            name, out = f"{name} and {again.__name__}", again(out, rng)
        yield name, out


def paths(tree: Tree, at: Path = ()) -> Iterator[Path]:
    """Where every value of a tree is."""
    if at:
        yield at
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from paths(tree[key], (*at, key))


def parent(tree: Tree, path: Path) -> Tree:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def edited(text: str, rng: random.Random, edit: Callable[[Tree, Any], None]) -> str:
    """The file with one value edited, written in block or flow style."""
    tree = yaml.safe_load(text)
    path = rng.choice(list(paths(tree)))
    edit(parent(tree, path), path[-1])
    return str(
        yaml.safe_dump(
            tree, sort_keys=False, allow_unicode=True, default_flow_style=rng.choice([None, False])
        )
    )


def drop(text: str, rng: random.Random) -> str:
    return edited(text, rng, lambda at, key: at.pop(key))


def rename(text: str, rng: random.Random) -> str:
    def edit(at: Tree, key: Any) -> None:
        if isinstance(at, dict):
            at[f"{key}s" if rng.random() < 0.5 else rng.choice([1, "é", "a.b", str(key)[::-1]])] = at.pop(key)

    return edited(text, rng, edit)


def replace(text: str, rng: random.Random) -> str:
    return edited(text, rng, lambda at, key: at.__setitem__(key, rng.choice(ODD)))


def misdirect(text: str, rng: random.Random) -> str:
    """An input of one hop from another hop, or from a column of it."""
    tree = yaml.safe_load(text)
    hop = tree["hops"][rng.choice([h for h in tree["hops"] if tree["hops"][h].get("in")])]
    port = rng.choice(list(hop["in"]))
    other = rng.choice([*tree["hops"], "nobody"])
    hop["in"][port] = rng.choice(
        [other, f"{other}.tokens", f"{other}.out", {"from": other, "delay": 1, "every": 3}]
    )
    return str(yaml.safe_dump(tree, sort_keys=False))


def swap(text: str, rng: random.Random) -> str:
    """The functions of two hops changed for each other."""
    tree = yaml.safe_load(text)
    a, b = rng.sample(list(tree["hops"]), 2)
    tree["hops"][a]["use"], tree["hops"][b]["use"] = tree["hops"][b]["use"], tree["hops"][a]["use"]
    return str(yaml.safe_dump(tree, sort_keys=False))


def duplicate(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    return "\n".join([*lines[: at + 1], *lines[at:]])


def indent(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = rng.choice([" " + lines[at], "\t" + lines[at], lines[at].lstrip(), "    " + lines[at]])
    return "\n".join(lines)


def cut(text: str, rng: random.Random) -> str:
    """The file ends, or lacks a piece, anywhere."""
    a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[:a] if rng.random() < 0.3 else text[:a] + text[min(b, a + 8) :]


def raw(text: str, rng: random.Random) -> str:
    """One plain word of the file replaced by something that YAML reads in a way of its own."""
    words = list(re.finditer(r"(?<=[:\[,] )[\w.-]+", text))
    word = rng.choice(words) if words else None
    return text[: word.start()] + rng.choice(RAW) + text[word.end() :] if word else text


def type_over(text: str, rng: random.Random) -> str:
    """One character replaced."""
    at = rng.randrange(max(1, len(text)))
    return text[:at] + rng.choice("{}[]:,#&*!|>'\"%@`é\0 \t\n-0") + text[at + 1 :]
