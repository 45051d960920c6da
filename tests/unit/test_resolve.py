"""Names become hops, ports and owners; what is unknown is said once and does not hide what else is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowgraph.passes.pipeline import load
from flowgraph.passes.rewrite import rewrite
from flowgraph.spec.config import convert_value, import_object
from tests.unit.graphs import RING, SMALL, codes, good, loaded

TOY = Path(__file__).parents[1] / "runtime" / "toy.yaml"


def test_columns_come_from_the_hop_that_is_named_or_from_one_before_it(tmp_path: Path) -> None:
    graph = good(tmp_path)
    bound = {(n.name, b.port.name): (b.via, b.producer) for n in graph.nodes.values() for b in n.bindings}
    assert bound["count", "key"] == ("batch", "split")
    assert bound["sync", "batch_id"] == ("total", "batch")
    assert bound["total", "score"] == ("count", "count")


def test_a_hop_s_own_unnamed_value_comes_before_one_of_that_name_further_up(tmp_path: Path) -> None:
    hops = RING + f"  again: {{use: {SMALL}.count, in: {{key: batch}}, with: {{bins: 1}}}}\n"
    graph = good(tmp_path, hops + f"  sum: {{use: {SMALL}.total, in: {{score: again}}}}\n")
    (binding,) = graph.nodes["sum"].bindings
    assert (binding.producer, binding.source and binding.source.name) == ("again", "out")


def test_a_hop_works_on_the_most_derived_rows_that_it_reads(tmp_path: Path) -> None:
    kinds = {name: node.kind for name, node in good(tmp_path).nodes.items()}
    assert kinds == {
        "source": "group",
        "split": "trajectory",
        "batch": "step",
        "count": "step",
        "total": "step",
        "sync": "step",
    }


def test_a_hop_without_an_owner_goes_where_it_is_read(tmp_path: Path) -> None:
    hops = RING.replace("total, in", "total, owner: trainer, in")
    graph = rewrite(good(tmp_path, hops, top="owners: {trainer: {}}\n"))
    assert [name for name, node in graph.nodes.items() if node.owner == "trainer"] == ["count", "total"]
    assert {node.owner for node in graph.nodes.values()} == {"driver", "trainer"}


def test_a_value_is_not_taken_for_another_of_a_different_name(tmp_path: Path) -> None:
    hops = (
        RING.replace("version: {from: sync", "version: {from: pool")
        + f"  pool: {{use: {SMALL}.pool, in: {{trajectory: split}}, with: {{places: 9}}}}\n"
    )
    assert codes(tmp_path, hops) == ["FG109 pool"]


def test_rows_that_are_sampled_come_from_a_hop_that_keeps_them(tmp_path: Path) -> None:
    hops = RING.replace(
        "small.batch, in: {trajectory: split}", "small.batch_of_waiting, in: {waiting: split}"
    )
    assert codes(tmp_path, hops) == ["FG109 split"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("group: source", "group: sorce", ["FG108 sorce"]),
        ("trajectory: split", "trajektory: split", ["FG109 trajektory"]),
        ("trajectory: split", "rows: split", ["FG109 rows"]),
        ("batch_id: total", "batch_id: total.batchid", ["FG109 total.batchid"]),
        ("with: {bins: 3}", "with: {bin: 3}", ["FG111 bin"]),
        ("with: {bins: 3}", "with: {bins: 3, bins: 4}", ["FG103 bins"]),
        ("small.count", "small.cuont", [f"FG107 {SMALL}.cuont"]),
        ("small.count", "small.State", [f"FG201 {SMALL}.State"]),
        ("small.source", "smal.source", ["FG107 tests.diagnostics.smal.source"]),
        ("delay: 1, ", "", ["FG401 sync"]),
        (", max_lag: 1", "", ["FG405 sync"]),
        ("max_lag: 1", "maxlag: 1", ["FG104 maxlag"]),
        ("delay: 1", "dealy: 1", ["FG104 dealy"]),
    ],
)
def test_one_mistake_is_one_finding(tmp_path: Path, old: str, new: str, expected: list[str]) -> None:
    assert RING.count(old) == 1
    assert codes(tmp_path, RING.replace(old, new)) == expected


def test_mistakes_that_have_nothing_to_do_with_each_other_are_all_found(tmp_path: Path) -> None:
    hops = (
        RING.replace("group: source", "group: sorce")
        .replace("bins: 3", "bins: x")
        .replace("total}", "total.nothing}")
    )
    assert codes(tmp_path, hops, top="run: {steps: 0}\n") == [
        "FG106 0",
        "FG108 sorce",
        "FG111 x",
        "FG109 total.nothing",
    ]


def test_a_module_that_fails_on_import_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (
        ("raises_one", "1 / 0"),
        ("exits_one", "raise SystemExit(3)"),
        ("unreadable_one", "def ("),
        ("loud_one", "print('hello')"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        (found,) = loaded(tmp_path, RING.replace(f"{SMALL}.source", f"{name}.source")).diagnostics
        assert found.code == "FG107"
        sys.modules.pop(name, None)
    assert not capsys.readouterr().out


def test_owner_options_are_checked_one_by_one(tmp_path: Path) -> None:
    engine = "  e: {engine: {use: transformers, modell: smollm2-135m, slots: many}}\n"
    learner = "  l: {learner: {use: torch, model: smollm2-135m, lr: -1}}\n"
    top = f"owners:\n{engine}{learner}"
    assert codes(tmp_path, top=top) == [
        "FG104 modell",
        "FG106 many",
        "FG106 -1",
    ]


def make(*, sign: int = 1) -> Callable[[int], int]:
    if sign not in (1, -1):
        raise ValueError("sign is 1 or -1")
    return lambda value: sign * value


def test_a_callable_is_an_import_path_or_a_factory_with_its_arguments() -> None:
    here = f"{__name__}.make"
    assert convert_value(here, Callable[..., Any]) is import_object(here)
    assert convert_value({"use": here, "sign": -1}, Callable[[int], int])(3) == -3
    assert convert_value(None, Callable[[int], int] | None) is None
    assert convert_value(here, Callable[[int], int] | None) is make
    with pytest.raises(ValueError, match="sign is 1"):
        convert_value({"use": here, "sign": 0}, Callable[..., Any])
    for value in (3, None, {}, {"use": 3}, f"{__name__}.SMALL"):
        with pytest.raises(TypeError):
            convert_value(value, Callable[..., Any])


@pytest.mark.parametrize(
    "path", ["", "json", ".json", "json.", "a b.c", "json.nothing", "json..loads", "é.\0"]
)
def test_what_is_no_import_path_raises_import_error(path: str) -> None:
    with pytest.raises(ImportError):
        import_object(path)


@pytest.mark.parametrize(
    ("wire", "advice"),
    [
        (", version: { from: sync, delay: 1, max_lag: 0 }", "version: {from: sync, delay: 1, max_lag: 0}"),
        (" free: buffer,", "free: buffer"),
        (" group: dataset,", "group: dataset"),
        (" taken: batch,", "taken: batch"),
        (" ready: buffer", "ready: buffer"),
        (", ground_truth: batch", "ground_truth: batch"),
        (" scored: reward,", "scored: reward"),
        (" trajectory: rollout,", "trajectory: <hop>"),  # which of those that add to it is not to be told
    ],
)
def test_a_missing_input_is_shown_as_it_can_be_written(tmp_path: Path, wire: str, advice: str) -> None:
    text = TOY.read_text()
    assert wire in text
    path = tmp_path / "graph.yaml"
    path.write_text(text.replace(wire, "", 1))
    (found,) = (d for d in load(str(path)).diagnostics if d.code == "FG110")
    assert found.help == f"add {advice} under in:"
