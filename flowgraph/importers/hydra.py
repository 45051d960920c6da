"""Configs of verl: a YAML file, or the overrides in a script's call of main_ppo, as one flat mapping."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowgraph.importers.shell import read_script

INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")
OVERRIDE = re.compile(r"(?P<add>\+{0,2}|~)(?P<name>[\w.@/-]+)(?:=(?P<value>.*))?", re.S)


def read_config(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(option → value, what could not be read) of a .yaml or a .sh, with overrides behind it.

    Raises ValueError naming the file or the override, and OSError.
    """
    if path.suffix == ".sh":
        script = read_script(path, ("verl.trainer.main_ppo", "main_ppo.py", "main_ppo"))
        given: dict[str, Any] = {}
        words, unread = [w for w in script.words if not w.startswith("--")], script.unread
    else:
        given, words, unread = dict(_flat(_yaml(path))), [], []
    for word in (*words, *overrides):
        _apply(given, word)
    return {name: _resolved(value, given) for name, value in given.items()}, unread


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds no mapping of options; give a config of verl, or a script that calls main_ppo"
        )
    found.pop("defaults", None)  # other files, which hydra would have merged
    return found


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _apply(given: dict[str, Any], word: str) -> None:
    """One hydra override: name=value, +name=value, ++name=value, ~name."""
    found = OVERRIDE.fullmatch(word.strip())
    if found is None or (found["value"] is None and found["add"] != "~"):
        raise ValueError(f"{word!r} is no override; write name=value as hydra does")
    if found["add"] == "~":
        given.pop(found["name"], None)
        return
    try:
        value = yaml.safe_load(found["value"])
    except yaml.YAMLError:
        value = found["value"]
    if isinstance(value, dict) and value:
        given |= _flat(value, f"{found['name']}.")
    else:
        given[found["name"]] = value


def _resolved(value: Any, given: dict[str, Any], depth: int = 0) -> Any:
    """What `${a.b}` and `${oc.select:a.b,default}` stand for; as written, where that is not given."""
    if not isinstance(value, str) or depth > 8:
        return value
    whole = INTERPOLATION.fullmatch(value)
    if whole is None:
        return value
    name, default = whole[1], whole[2]
    if name in given:
        return _resolved(given[name], given, depth + 1)
    return value if default is None else yaml.safe_load(default)
