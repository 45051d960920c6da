"""The JSON Schema: what the reader reads it accepts, and what the reader refuses as a key it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from flowgraph.cli import main
from flowgraph.spec.graphfile import read_graph
from flowgraph.spec.schema import graph_schema, shipped_hops
from flowgraph.spec.source import read

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(json.dumps(graph_schema()))
FULL: dict[str, Any] = {
    "graph": "g",
    "doc": "every key of the format",
    "dims": {"group": 8, "prompt": {"mean": 4.5, "max": 8}},
    "owners": {
        "driver": None,
        "rollout": {"processes": 1, "threads": 2, "engine": {"use": "transformers", "model": "m", "slots": 4}},
        "trainer": {"learner": {"use": "torch", "model": "m", "lr": 1e-5, "betas": [0.9, 0.95]}},
    },
    "hops": {
        "a": {"use": "x.y", "in": None},
        "b": {
            "use": "x.z",
            "in": {"p": "a", "q": {"from": "a.c", "delay": 1, "max_lag": 2, "every": 3}},
            "with": {"n": 1},
            "owner": "trainer",
            "capacity": 0,
        },
    },
    "budgets": {"driver": ["64 KB/step", "2 GiB"], "a -> b": "1.5 MB / step", "/dev/shm": 3_000_000_000},
    "run": {"steps": 3, "seed": 1, "deadline": 5, "show": ["a.b"]},
    "models": {"m": {"source": "s", "sha256": "0"}},
}  # fmt: skip
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
SAID = {
    "discriminator",
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "$defs",
}  # of no effect on what is valid


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """JSON Schema, as far as ours goes; a keyword that is not known here fails the test."""
    checks = {
        "$ref": lambda ref: valid(value, SCHEMA["$defs"][ref.removeprefix("#/$defs/")]),
        "anyOf": lambda some: any(valid(value, one) for one in some),
        "enum": lambda some: value in some,
        "type": lambda name: isinstance(value, TYPES[name]) and (name == "boolean") == isinstance(value, bool),
        "minimum": lambda least: value >= least,
        "maximum": lambda most: value <= most,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "required": lambda names: set(names) <= set(value),
        "properties": lambda known: all(valid(v, known[k]) for k, v in value.items() if k in known),
        "additionalProperties": lambda other: all(
            other is not False and valid(v, other) for k, v in value.items() if k not in schema.get("properties", ())
        ),
        "items": lambda one: all(valid(v, one) for v in value),
        "prefixItems": lambda some: all(valid(v, one) for v, one in zip(value, some, strict=False)),
        "minItems": lambda least: len(value) >= least,
        "maxItems": lambda most: len(value) <= most,
    }  # fmt: skip
    rules = sorted(
        schema.items(), key=lambda rule: rule[0] != "type"
    )  # what is of another type is looked at no more
    return all(
        checks[name](rule) for name, rule in rules if name not in SAID and (name, rule) != ("items", False)
    )


@pytest.mark.parametrize("name", ["graphs/quickstart.yaml", "tests/runtime/toy.yaml", "bench/vs_trl.yaml"])
def test_a_graph_of_this_repository_is_valid(name: str) -> None:
    assert valid(yaml.safe_load((ROOT / name).read_text()), SCHEMA)


def records(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every mapping of FULL whose keys are the format's and not the user's."""
    users = ("dims", "owners", "hops", "budgets", "models")
    own = not (path and path[-1] in users and len(path) == 1) and (path[-1:] not in (("in",), ("with",)))
    below = [r for k, v in tree.items() if isinstance(v, dict) for r in records(v, (*path, k))]
    return [path, *below] if own else below


@pytest.mark.parametrize("path", records(FULL), ids=lambda p: ".".join(p) or "top")
def test_reader_and_schema_refuse_the_same_unknown_key(path: tuple[Any, ...]) -> None:
    graph = json.loads(json.dumps(FULL))
    assert valid(graph, SCHEMA)
    at = graph
    for key in path:
        at = at[key]
    at["no such key"] = 1
    assert not valid(graph, SCHEMA)


def test_the_reader_takes_every_key_of_the_full_file_and_offers_those_of_the_schema() -> None:
    text = yaml.safe_dump(FULL, sort_keys=False)
    root, found = read("f", text)
    assert root is not None
    assert [*found, *read_graph("f", root)[1]] == []
    places = {
        (): "GraphForm",
        ("owners", "rollout"): "OwnerForm",
        ("hops", "b"): "HopForm",
        ("hops", "b", "in", "q"): "InputForm",
        ("run",): "RunDecl",
    }
    for path, form in places.items():
        graph = json.loads(json.dumps(FULL))
        at = graph
        for key in path:
            at = at[key]
        assert set(at) <= set(SCHEMA["$defs"][form]["properties"])
        at["no such key"] = 1
        root, _ = read("f", yaml.safe_dump(graph))
        assert root is not None
        (finding,) = [d for d in read_graph("f", root)[1] if d.code == "FG104"]
        offered = finding.help.partition("keys here: ")[2].split(", ")
        assert offered == list(SCHEMA["$defs"][form]["properties"])


@pytest.mark.parametrize(
    "edit",
    [
        {"graph": 3},
        {"dims": {"group": 0}},
        {"dims": {"prompt": {"mean": 3}}},
        {"owners": {"rollout": {"processes": 0}}},
        {"owners": {"rollout": {"engine": {"use": "nothing", "model": "m"}}}},
        {"hops": {"a": {}}},
        {"hops": {"a": {"use": "x.y", "in": {"p": {"delay": 1}}}}},
        {"budgets": {"driver": "64 kb"}},
        {"budgets": {"driver": ["64 KB/step", -1]}},
        {"run": {"steps": 0}},
        {"run": {"show": "a.b"}},
        {"models": {"m": {"source": "s"}}},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_form_is_not_valid(edit: dict[str, Any]) -> None:
    assert not valid(FULL | edit, SCHEMA)


def test_use_offers_the_shipped_hops_and_takes_any_path() -> None:
    use = SCHEMA["$defs"]["HopForm"]["properties"]["use"]
    assert use["examples"] == list(shipped_hops())
    quickstart = yaml.safe_load((ROOT / "graphs/quickstart.yaml").read_text())
    assert {hop["use"] for hop in quickstart["hops"].values()} <= set(use["examples"])
    assert valid("my.own.hop", use)


def test_the_command_prints_what_lies_in_docs() -> None:
    printed = CliRunner().invoke(main, ["schema"]).stdout
    assert printed == (ROOT / "docs/graph.schema.json").read_text(encoding="utf-8")
    assert json.loads(printed) == SCHEMA
