"""Graph files with one thing wrong: a seeded stream of edits to a good one, as a person might make them by accident."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from tests.graphs.retyped import variant_of

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

# Hops that take a hop's place, with ports of other types; and columns, of many types, that a ring has.
ROLES = {
    "dataset": ["hops.dataset.table", "tests.runtime.toy.numbers"],
    "rollout": [*(f"tests.runtime.{hop}" for hop in ("toy.sample", "users.straggle", "users.hinted"))],
    "batch": ["tests.runtime.users.batch_of_tuples"],
    "reward": ["tests.runtime.toy.reward"],
    "advantage": ["tests.runtime.users.keep"],
    "train": ["tests.runtime.toy.train"],
    "sync": ["tests.runtime.toy.publish"],
    "eval": ["tests.runtime.toy.evaluate"],
}
COLUMNS = [
    *(
        "tokens",
        "logprobs",
        "versions",
        "response_mask",
        "leaf_offsets",
        "score",
        "scored",
        "token_level_rewards",
    ),
    *("uid", "sample", "trajectory", "key", "batch_id", "lag", "prompt", "ground_truth", "out", "weights"),
]

Tree = Any
Path = tuple[Any, ...]


def mutants(text: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """(what was done, the file) for `count` edits of a graph file; the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        edit = rng.choice(
            [drop, rename, replace, miswire, retype, duplicate, swap, raw, indent, cut, type_over]
        )
        name, out = edit.__name__, edit(text, rng)
        if rng.random() < 0.3:
            again = rng.choice([raw, indent, cut, type_over])
            name, out = f"{name} and {again.__name__}", again(out, rng)
        yield name, out


def broken(text: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """(family, the file) for `count` edits of what a graph means, in YAML that stays sound: each family in turn."""
    rng = random.Random(seed)
    for number in range(count):
        family = FAMILIES[number % len(FAMILIES)]
        yield family.__name__, family(text, rng)


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


def miswire(text: str, rng: random.Random) -> str:
    """An input of one hop from another hop, or from a column of it."""

    def edit(tree: Tree) -> None:
        inputs, port = _input(tree, rng)
        other = rng.choice([*tree["hops"], *tree["hops"], "nobody"])
        column = f"{other}.{rng.choice([port, 'tokens', 'out'])}"
        inputs[port] = rng.choice([other, other, column, {"from": other, "delay": 1, "every": 3}])

    return changed(text, edit)


def retype(text: str, rng: random.Random) -> str:
    """A port of another type: a hop of the same role with other ports, or an input from a column of another dtype."""

    def edit(tree: Tree) -> None:
        kind = rng.choice(["port", "port", "port", "role", "column"])
        if kind == "column":
            inputs, port = _input(tree, rng)
            inputs[port] = f"{_hop_of(inputs[port])}.{rng.choice(COLUMNS)}"
            return
        name = rng.choice(list(tree["hops"]))
        if kind == "role" and name in ROLES:
            tree["hops"][name]["use"] = rng.choice(ROLES[name])
        elif isinstance(tree["hops"][name].get("use"), str):
            tree["hops"][name]["use"] = variant_of(tree["hops"][name]["use"], rng)

    return changed(text, edit)


def _input(tree: Tree, rng: random.Random) -> tuple[Tree, str]:
    """One of the graph's inputs, each as likely: the `in:` that it stands in, and its port."""
    return rng.choice([(hop["in"], port) for hop in tree["hops"].values() for port in hop.get("in", {})])


def _hop_of(given: Any) -> str:
    reference = given["from"] if isinstance(given, dict) else given
    return str(reference).partition(".")[0]


def changed(text: str, edit: Callable[[Tree], None]) -> str:
    tree = yaml.safe_load(text)
    edit(tree)
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


# What a file still means, or no longer does, once its YAML is sound.
FAMILIES = (drop, rename, retype, miswire)
