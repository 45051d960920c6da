"""The keys of a graph file: each mistake is one finding, at its own place."""

from __future__ import annotations

import pytest

from flowgraph.errors import Diagnostic
from flowgraph.spec.dims import Size
from flowgraph.spec.graphfile import GraphFile, read_graph
from flowgraph.spec.reader import guess
from flowgraph.spec.source import read
from flowgraph.spec.units import Amount

GOOD = """\
graph: g
dims: {group: 8, prompt: {mean: 4.5, max: 8}}
owners: {driver: , trainer: {threads: 2}}
hops:
  a: {use: x.y}
  b: {use: x.z, in: {p: a, q: {from: a.c, delay: 1, max_lag: 2, every: 3}}, with: {n: 1}, owner: trainer, capacity: 0}
run: {steps: 3, deadline: 5, show: [a.b]}
budgets: {driver: [64 KB/step, 2 GiB], a -> b: 1000}
"""


def load(text: str) -> tuple[GraphFile, list[Diagnostic]]:
    root, found = read("f", text)
    assert root is not None
    file, more = read_graph("f", root)
    return file, [*found, *more]


def test_a_whole_file_is_read() -> None:
    file, found = load(GOOD)
    assert not found
    assert file.dims == {"group": Size(8, 8), "prompt": Size(4.5, 8)}
    assert list(file.owners) == ["driver", "trainer"]
    assert file.owners["trainer"].threads == 2
    b = file.hops["b"]
    assert (b.use, b.owner, b.capacity) == ("x.z", "trainer", 0)
    assert (b.inputs["p"].ref, b.inputs["p"].max_lag, b.inputs["p"].every) == ("a", None, 1)
    q = b.inputs["q"]
    assert (q.ref, q.delay, q.max_lag, q.every, str(q.place)) == ("a.c", 1, 2, 3, "f:6:38")
    assert (file.run.steps, file.run.seed, file.run.deadline, file.run.show) == (3, 0, 5.0, ["a.b"])
    assert [(b.name, str(b.at), b.amount, str(b.place)) for b in file.budgets] == [
        ("driver", "f:8:11", Amount(64_000, True, "64 KB/step"), "f:8:20"),
        ("driver", "f:8:11", Amount(2 * 2**30, False, "2 GiB"), "f:8:32"),
        ("a -> b", "f:8:40", Amount(1000, False, "1000 B"), "f:8:48"),
    ]
    assert [b.seam for b in file.budgets] == [None, None, ("a", "b")]
    assert not file.partial


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        ("graph: g", "graph: ''", ["f:1:8 FG106"]),
        ("graph: g", "graph: a/b", ["f:1:8 FG106"]),
        ("graph: g", "graph: ..", ["f:1:8 FG106"]),
        ("graph: g\n", "grpah: g\n", ["f:1:1 FG104"]),
        ("graph: g\n", "", ["f:1:1 FG105"]),
        ("graph: g\n", "graph: g\nbudget: {driver: 64 KB/step}\n", ["f:2:1 FG104"]),
        ("64 KB/step, ", "64 KB per step, ", ["f:8:20 FG503"]),
        ("64 KB/step, ", "true, ", ["f:8:20 FG503"]),
        ("2 GiB", "-1", ["f:8:32 FG503"]),
        ("[64 KB/step, 2 GiB]", "[]", ["f:8:19 FG503"]),
        ("[64 KB/step, 2 GiB]", "{a: 1}", ["f:8:19 FG503"]),
        ("a -> b: 1000", "a -> b: 1e3", ["f:8:48 FG503"]),
        ("budgets: {driver: [64 KB/step, 2 GiB], a -> b: 1000}", "budgets: [1]", ["f:8:10 FG106"]),
        ("group: 8", "group: 0", ["f:2:15 FG106"]),
        ("group: 8", "group: true", ["f:2:15 FG106"]),
        ("group: 8", "group: 9999999999", ["f:2:15 FG106"]),
        ("mean: 4.5", "mean: 9", ["f:2:26 FG106"]),
        ("mean: 4.5", "meen: 4", ["f:2:26 FG106"]),
        ("dims: {group: 8,", "dims: {group: [8],", ["f:2:15 FG106"]),
        ("threads: 2", "threads: 0", ["f:3:39 FG106"]),
        ("threads: 2", "processes: 2", ["f:3:41 FG106"]),
        ("threads: 2", "thread: 2", ["f:3:30 FG104"]),
        ("  a: {use: x.y}", "  a: {usee: x.y}", ["f:5:7 FG104"]),
        ("  a: {use: x.y}", "  a:", ["f:5:3 FG105"]),
        ("  a: {use: x.y}", "  a: x.y", ["f:5:6 FG106"]),
        ("  a: {use: x.y}", "  a: [1]", ["f:5:6 FG106"]),
        ("  a: {use: x.y}", "  a: {use: 3}", ["f:5:12 FG106"]),
        ("  a: {use: x.y}", "  a.b: {use: x.y}", ["f:5:3 FG106"]),
        ("p: a,", "p: ,", ["f:6:24 FG106"]),
        ("p: a,", "p: [a],", ["f:6:25 FG106"]),
        ("p: a,", "p: {},", ["f:6:25 FG105"]),
        ("from: a.c", "form: a.c", ["f:6:32 FG104"]),
        ("delay: 1", "delay: -1", ["f:6:50 FG106"]),
        ("every: 3", "every: 0", ["f:6:72 FG106"]),
        ("capacity: 0", "capacity: -1", ["f:6:117 FG106"]),
        ("steps: 3", "steps: 0", ["f:7:14 FG106"]),
        ("deadline: 5", "deadline: .nan", ["f:7:27 FG102"]),
        ("show: [a.b]", "show: a.b", ["f:7:36 FG106"]),
        ("run:", "models: {m: {source: x}}\nrun:", ["f:7:9 FG106"]),
    ],
)
def test_one_mistake_is_one_finding(old: str, new: str, codes: list[str]) -> None:
    assert GOOD.count(old) == 1
    _, found = load(GOOD.replace(old, new))
    assert [f"{d.place} {d.code}" for d in found] == codes


@pytest.mark.parametrize("text", ["[]", "x", "3"])
def test_a_file_that_is_no_mapping_is_one_finding(text: str) -> None:
    assert [d.code for d in load(text)[1]] == ["FG106"]


def test_an_unknown_name_is_guessed_by_nearness_and_else_by_elimination() -> None:
    assert guess(["usee"], ["use", "in"], ["use"]) == {"usee": "use"}
    assert guess(["zzz"], ["use", "in"], ["use"]) == {"zzz": "use"}
    assert guess(["zzz", "yyy"], ["use", "in"], ["use"]) == {}
    assert guess(["use", "usee"], ["use", "in"], ["use"]) == {}
