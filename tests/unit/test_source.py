"""YAML with positions: what a place spans is what the value was read from."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.errors import Diagnostic, Place
from flowgraph.spec.render import render
from flowgraph.spec.source import Located, read, set_path, split_path

SCALARS = (
    st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text("abé漢_ -:#'\"", max_size=8)
)
NAMES = st.text("abcdefgh_", min_size=1, max_size=6).filter(lambda name: name not in ("", "_"))
TREES = st.recursive(
    SCALARS, lambda t: st.lists(t, max_size=3) | st.dictionaries(NAMES, t, max_size=4), max_leaves=10
)


def leaves(node: Located) -> list[Located]:
    if isinstance(node.value, dict):
        return [leaf for value in node.value.values() for leaf in leaves(value)]
    return [leaf for item in node.value for leaf in leaves(item)] if isinstance(node.value, list) else [node]


def span(text: str, place: Place) -> str:
    return text.splitlines()[place.line - 1][place.column - 1 : place.column - 1 + place.width]


@given(TREES, st.sampled_from([None, True, False]))
def test_reading_the_span_of_a_scalar_again_gives_the_scalar(tree: Any, flow: bool | None) -> None:
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True, sort_keys=False, width=10**6)
    root, found = read("f", text)
    assert root is not None
    assert not found
    assert root.plain() == tree
    for leaf in leaves(root):
        again, _ = read("f", span(text, leaf.place))
        assert again is not None
        assert again.plain() == leaf.value


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, SCALARS, min_size=1), min_size=1))
def test_keys_have_the_place_of_their_name(tree: dict[str, Any]) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True, width=10**6)
    root, _ = read("f", text)
    assert root is not None
    for node in (root, *root.value.values()):
        assert all(span(text, place) == name for name, place in node.keys.items())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("-3", -3),
        (".5", 0.5),
        ("1.", 1.0),
        ("true", True),
        ("~", None),
        ("'1e-5'", "1e-5"),
        ("1e5x", "1e5x"),
    ],
)
def test_a_scalar_is_what_it_looks_like(text: str, value: Any) -> None:
    root, found = read("f", f"a: {text}")
    assert root is not None
    assert not found
    assert root.value["a"].value == value
    assert type(root.value["a"].value) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "on",
        "Yes",
        "TRUE",
        "1:30",
        "010",
        "0x1F",
        "1_000",
        "2026-01-01",
        ".inf",
        ".nan",
        "1e999",
        "*a",
        "!x y",
        "=",
    ],
)
def test_a_scalar_that_is_not_what_it_looks_like_is_refused_where_it_stands(text: str) -> None:
    root, found = read("f", f"deep: {{ a: {text} }}")
    assert root is not None
    assert [(d.code, str(d.place), d.place.width) for d in found] == [("FG102", "f:1:12", len(text))]
    assert root.unread


def test_a_key_that_stands_twice_keeps_the_first_that_says_something() -> None:
    root, found = read("f", "a:\na: 1\na: 2\n")
    assert root is not None
    assert root.plain() == {"a": 1}
    assert [(d.code, d.place.line) for d in found] == [("FG103", 2), ("FG103", 3)]


def one_set(assignment: str, text: str = "run: {steps: 3}\nempty:\n") -> tuple[Any, list[Diagnostic]]:
    root, _ = read("f", text)
    assert root is not None
    found = set_path(root, assignment)
    return root.plain(), found


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("run.steps=5", ("run", "steps"), 5),
        ("run.lr=1e-5", ("run", "lr"), 1e-5),
        ("empty.new.deep=x", ("empty", "new", "deep"), "x"),
        ("run.text=", ("run", "text"), ""),
        ('run."a.b".c=1', ("run", "a.b", "c"), 1),
        ("run.'k=v'=2", ("run", "k=v"), 2),
        ("run.file=data/x.jsonl", ("run", "file"), "data/x.jsonl"),
        ("run.file='a b.jsonl'", ("run", "file"), "a b.jsonl"),
        ("run.stop=[\"\\n\", '}']", ("run", "stop"), ["\n", "}"]),
        ('run.o={use: x, "k": {n: 1}}', ("run", "o"), {"use": "x", "k": {"n": 1}}),
        ("run.{odd}=1", ("run", "{odd}"), 1),
        ("run.eq=a=b", ("run", "eq"), "a=b"),
    ],
)
def test_an_override_sets_one_value(assignment: str, path: tuple[str, ...], value: Any) -> None:
    tree, found = one_set(assignment)
    assert not found
    for name in path:
        tree = tree[name]
    assert tree == value


@pytest.mark.parametrize(
    ("assignment", "code", "column"),
    [
        ("run.steps", "FG105", 1),
        ("=3", "FG105", 1),
        ("run..x=3", "FG105", 1),
        ("run.'x=3", "FG105", 1),
        ("run.steps.x=3", "FG106", 1),
        ("run.steps=no", "FG102", 11),
        ("run.steps={a: [1}", "FG101", 17),
    ],
)
def test_an_override_that_is_wrong_has_a_place_in_the_option(assignment: str, code: str, column: int) -> None:
    _, found = one_set(assignment)
    assert [(d.code, d.place.file, d.place.line, d.place.column) for d in found] == [
        (code, "--set", 1, column)
    ]


def test_the_second_override_is_line_two_and_quoted() -> None:
    root, _ = read("f", "run: {}")
    assert root is not None
    found = set_path(root, "run.steps=no", line=2)
    shown = render(found, {"--set": "run.seed=1\nrun.steps=no"})
    assert shown.splitlines()[:3] == [
        "--set:2:11: error[FG102] YAML 1.1 reads no as a truth value, which is rarely meant",
        "    2 | run.steps=no",
        "      |           ^^",
    ]


@given(st.lists(st.text(st.characters(exclude_characters='"'), min_size=1), min_size=1), st.text())
def test_quoted_names_and_any_value_come_apart_as_they_were_put_together(
    names: list[str], value: str
) -> None:
    path = ".".join(f'"{name}"' for name in names)
    assert split_path(f"{path}={value}") == (names, len(path) + 1)


def test_the_caret_stands_under_wide_characters_and_tabs() -> None:
    text = "a:\t漢字é x"
    shown = render([Diagnostic("FG106", Place("f", 1, 8, 1), "m", "h")], {"f": text}).splitlines()
    assert shown[2] == "      |   \t" + " " * 6 + "^"
