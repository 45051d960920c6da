"""What is said to bring a graph under its budget does, and the next larger value does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowgraph
from flowgraph.passes.rewrite import PASSES
from flowgraph.plan.compile import hold
from flowgraph.plan.remedy import largest

TOY = Path(__file__).parents[1] / "runtime" / "toy.yaml"
QUICKSTART = Path(__file__).parents[2] / "graphs/quickstart.yaml"
SET = re.compile(r"--set (\S+)=(\d+)")


def help_of(graph: Path, budget: str, amount: str, off: list[str] | None = None) -> str:
    (found,) = flowgraph.load(graph, {f'budgets."{budget}"': amount}, no_pass=off or []).diagnostics
    assert found.code == "FG502"
    return found.help


@pytest.mark.parametrize(
    ("graph", "budget", "amount"),
    [
        (QUICKSTART, "driver", "8 KB/step"),
        (QUICKSTART, "batch -> reward", "6 KB/step"),
        (QUICKSTART, "rollout", "400 MB"),
        (TOY, "driver", "700 B/step"),
        (TOY, "shared memory", "600 B/step"),
        (TOY, "/dev/shm", "22 KB"),
    ],
)
def test_a_dim_that_is_named_brings_it_under_and_one_more_does_not(
    graph: Path, budget: str, amount: str
) -> None:
    said = help_of(graph, budget, amount)
    options = SET.findall(said)
    assert options, said
    for path, value in options:
        limit = {f'budgets."{budget}"': amount}
        assert not flowgraph.load(graph, limit | {path: int(value)}).diagnostics
        if "max" not in path:
            assert flowgraph.load(graph, limit | {path: int(value) + 1}).diagnostics


def test_several_dims_are_named_where_one_is_not_enough() -> None:
    said = help_of(TOY, "dispatch -> rollout", "12 B/step")
    options = SET.findall(said)
    assert " or --set" not in said
    assert len(options) > 1
    limit = {'budgets."dispatch -> rollout"': "12 B/step"}
    assert not flowgraph.load(TOY, limit | {path: int(value) for path, value in options}).diagnostics


@pytest.mark.parametrize("off", [["defer"], ["project", "defer"], list(PASSES)], ids="+".join)
def test_passes_that_are_named_bring_it_under_and_one_fewer_does_not(off: list[str]) -> None:
    said = help_of(TOY, "driver", "1 KB/step", off)
    match = re.match(r"leave (.+) on, or raise", said)
    assert match, said
    names = match[1].split(" and ")
    limit = {"budgets": {"driver": "1 KB/step"}}
    left = [name for name in off if name not in names]
    assert not flowgraph.load(TOY, limit, no_pass=left).diagnostics
    for name in names:
        assert flowgraph.load(TOY, limit, no_pass=[*left, name]).diagnostics


def test_what_nothing_brings_under_says_the_least_there_is() -> None:
    said = help_of(TOY, "driver", "1 B/step")
    assert re.match(r"no pass and no dim brings it under, \d+ B/step is the least: read less over ", said)


def test_another_owner_is_named_for_a_hop_that_the_file_places() -> None:
    limit = {"hops.reward.owner": "driver", "budgets": {"driver": "9 KB/step"}}
    (found,) = flowgraph.load(QUICKSTART, limit).diagnostics
    owners = re.findall(r"--set hops.reward.owner=(\w+)", found.help)
    assert "trainer" in owners
    for owner in owners:
        assert not flowgraph.load(QUICKSTART, limit | {"hops.reward.owner": owner}).diagnostics


def test_without_budgets_nothing_is_compiled_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    loaded = flowgraph.load(TOY)
    monkeypatch.setattr("flowgraph.plan.compile.compile_graph", refuse)
    hold(loaded)
    assert loaded.diagnostics == []


@given(st.integers(0, 5000), st.integers(1, 3), st.floats(0.1, 100), st.floats(0, 1e5), st.integers(1, 5000))
def test_the_largest_value_that_fits_is_found(
    base: int, power: int, factor: float, budget: float, most: int
) -> None:
    def cost(n: int) -> float:
        return base + factor * float(n // 3) ** power

    found = largest(cost, budget, most)
    assert found == max((n for n in range(1, most + 1) if cost(n) <= budget), default=0)
