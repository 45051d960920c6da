"""What an import gives: a graph file, and an account of every option of the run that it describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import yaml

FULL = (
    "prompts and responses are as long as they may be; say how long yours are: --set 'dims.response.mean=800'"
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Imported(msgspec.Struct):
    """graph: the text of the file.

    used: option → what it decided; ignored: option → why it changes nothing that crosses; unknown: neither is known of
    assumed: what the options do not say, and what was taken in its place
    """

    graph: str
    used: dict[str, str]
    ignored: dict[str, str]
    unknown: list[str]
    assumed: list[str]

    def __str__(self) -> str:
        """The account, for people."""
        lines = [f"used {len(self.used)} options"]
        lines += [f"  {name}: {what}" for name, what in self.used.items()]
        reasons: dict[str, list[str]] = {}
        for name, why in self.ignored.items():
            reasons.setdefault(why, []).append(name)
        lines += [f"ignored {len(self.ignored)}, which change nothing that crosses a seam"] if reasons else []
        lines += [f"  {why}: {', '.join(names)}" for why, names in reasons.items()]
        lines += [f"not known, so not in the graph: {', '.join(self.unknown)}"] if self.unknown else []
        lines += ["assumed"] if self.assumed else []
        return "\n".join([*lines, *(f"  {one}" for one in self.assumed)])


def model_of(path: str, assumed: list[str]) -> str:
    """The name that a graph can have for a model: a hub id as it is, of any other path its last part.

    What lies on another machine is known by no number here; then `unknown/NAME` stands for it, and is not priced.
    """
    if HUB_ID.fullmatch(path):
        return path
    name = re.sub(r"[^\w.-]", "", path.rstrip("/").rpartition("/")[2]) or "model"
    assumed.append(f"{path} is not on this machine, so weights have no price; --model gives them one")
    return f"unknown/{name}"


def full(most: int) -> dict[str, int]:
    """A length of which only the bound is known, written so that its mean can be overridden."""
    return {"mean": most, "max": most}


def fitting(ranks: Mapping[str, int], rows: int) -> dict[str, int]:
    """The axes with more than one rank; no more share rows than there are rows, as the others get padding."""
    most = {"trajectory": rows}
    found = {axis: min(n, most.get(axis, n)) for axis, n in ranks.items()}
    return {axis: n for axis, n in found.items() if n > 1}


class _Plain(yaml.SafeDumper):
    """Every value is written out where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def graph_text(graph: Mapping[str, Any], comments: list[str]) -> str:
    """A graph file: comments, then the keys in their order, the innermost mappings on one line."""
    body = yaml.dump(
        dict(graph), Dumper=_Plain, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    return "".join(f"# {line}\n" for line in comments) + body


def reason(rules: Mapping[str, list[str]], name: str) -> str:
    """The first reason with a pattern that fits the whole name, "" for none."""
    return next((why for why, names in rules.items() if any(fnmatchcase(name, one) for one in names)), "")
