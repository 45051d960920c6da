"""Owners for hops that nobody placed: cuts worked out by hand, cuts against every assignment, and what is claimed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph.cli import main
from flowgraph.errors import Place
from flowgraph.ir.graph import Binding, Graph, Node
from flowgraph.passes.cut import crossing, cut, nets
from flowgraph.passes.pipeline import load
from flowgraph.passes.rewrite import PASSES
from flowgraph.plan.compile import compile_file
from flowgraph.report import placement as placing
from flowgraph.report.placement import Placement, Suggestion, placement
from flowgraph.spec.dims import integer
from flowgraph.spec.form import RunDecl
from flowgraph.spec.graphfile import GraphFile, InputDecl
from flowgraph.spec.hop import Facts, HopSpec
from flowgraph.spec.ports import Port

QUICKSTART = str(Path(__file__).parents[2] / "graphs" / "quickstart.yaml")
HERE = Place("ring.yaml", 1, 1)


class Column(NamedTuple):
    """One column: who writes it, who reads it, and its bytes a step."""

    writer: str
    readers: tuple[str, ...]
    nbytes: int


def ring(owners: Mapping[str, str], free: Iterable[str], columns: Iterable[Column]) -> Graph:
    """A graph of hops on steps that hand each other bytes."""
    columns = list(columns)
    file = GraphFile("ring", "ring.yaml", "", {}, {}, {}, {}, RunDecl(), {}, HERE)
    ports = [Port(f"x{i}", "array", "uint8", (integer(c.nbytes),)) for i, c in enumerate(columns)]
    nodes = {}
    for name, owner in owners.items():
        made = tuple(p for p, c in zip(ports, columns, strict=True) if c.writer == name)
        read = [(p, c) for p, c in zip(ports, columns, strict=True) if name in c.readers]
        spec = HopSpec("mine.hop", ring, Facts("hop"), tuple(p for p, _ in read), made, (), None, HERE, "")
        bindings = [
            Binding(p, c.writer, c.writer, p, InputDecl(p.name, c.writer, HERE, HERE)) for p, c in read
        ]
        nodes[name] = Node(name, spec, HERE, owner, {}, bindings, "step", free=name in free)
    return Graph(file, {}, nodes)


def cost(columns: Iterable[Column], owners: Mapping[str, str]) -> int:
    """What is paid for every column: once an owner that reads it and did not write it."""
    return sum(n * len({owners[r] for r in readers} - {owners[w]}) for w, readers, n in columns)


# --- by hand -----------------------------------------------------------------------------------------------


def test_a_hop_goes_where_it_reads_most() -> None:
    owners = {"rollout": "rollout", "score": "trainer", "train": "trainer"}
    columns = [Column("rollout", ("score",), 100), Column("score", ("train",), 4)]
    graph = ring(owners, ["score"], columns)
    assert cut(graph) == {"score": "rollout"}
    assert crossing(nets(graph), owners) == 100
    assert crossing(nets(graph), owners | {"score": "rollout"}) == 4


def test_what_another_hop_of_the_owner_reads_too_is_no_reason_to_move() -> None:
    """The tokens cross for the learner whether or not the score is made beside it; moving would cost its 4 bytes."""
    columns = [Column("rollout", ("score", "train"), 100), Column("score", ("train",), 4)]
    graph = ring({"rollout": "rollout", "score": "trainer", "train": "trainer"}, ["score"], columns)
    assert cut(graph) == {"score": "trainer"}
    assert cut(graph, fused=False) == {"score": "rollout"}  # else they are read twice


def test_hops_move_together_where_none_would_alone() -> None:
    owners = {"rollout": "rollout", "a": "trainer", "b": "trainer", "train": "trainer"}
    columns = [Column("rollout", ("a",), 10), Column("a", ("b",), 100), Column("b", ("train",), 5)]
    assert cost(columns, owners | {"a": "rollout"}) > cost(columns, owners)
    assert cut(ring(owners, ["a", "b"], columns)) == {"a": "rollout", "b": "rollout"}


def test_among_three_owners_each_hop_finds_its_own() -> None:
    """a:50→p:30→q→c:10 and b:40→q: 40 bytes cross at p on a and q on b; 50 at both on a, 60 on b, 70 with q on c."""
    owners = {"left": "a", "right": "b", "last": "c", "p": "c", "q": "c"}
    columns = [
        Column("left", ("p",), 50),
        Column("right", ("q",), 40),
        Column("p", ("q",), 30),
        Column("q", ("last",), 10),
    ]
    found = cut(ring(owners, ["p", "q"], columns))
    assert found == {"p": "a", "q": "b"}
    assert cost(columns, owners | found) == 40


def test_the_driver_is_never_chosen_and_a_hop_on_it_moves_when_that_is_less() -> None:
    owners = {"source": "driver", "train": "trainer", "score": "trainer"}
    columns = [Column("source", ("score",), 1000), Column("score", ("train",), 1)]
    assert cut(ring(owners, ["score"], columns)) == {"score": "trainer"}
    assert cut(ring(owners | {"score": "driver"}, ["score"], columns)) == {"score": "driver"}
    back = [Column("train", ("score",), 2000), *columns]
    assert cut(ring(owners | {"score": "driver"}, ["score"], back)) == {"score": "trainer"}


def test_a_hop_that_exchanges_nothing_stays() -> None:
    assert cut(ring({"train": "trainer", "idle": "rollout"}, ["idle"], [])) == {"idle": "rollout"}
    assert cut(ring({"train": "trainer"}, [], [])) == {}


# --- against every assignment ------------------------------------------------------------------------------


class Case(NamedTuple):
    owners: dict[str, str]
    free: list[str]
    columns: list[Column]


@st.composite
def cases(draw: st.DrawFn, workers: tuple[str, ...], now: tuple[str, ...]) -> Case:
    """Up to four free hops, at `now`, among placed ones of every worker and of the driver."""
    free = [f"free{i}" for i in range(draw(st.integers(1, 4)))]
    placed = {f"{owner}{i}": owner for owner in ("driver", *workers) for i in range(2)}
    owners = placed | {name: draw(st.sampled_from(now)) for name in free}
    names = sorted(owners)
    columns = []
    for _ in range(draw(st.integers(1, 9))):
        writer = draw(st.sampled_from(names))
        readers = draw(
            st.lists(st.sampled_from([n for n in names if n != writer]), min_size=1, max_size=4, unique=True)
        )
        columns.append(Column(writer, tuple(readers), draw(st.integers(0, 20))))
    return Case(owners, free, columns)


@settings(deadline=None, max_examples=300)
@given(cases(("a", "b"), now=("a", "b")))
def test_between_two_owners_no_assignment_is_better(case: Case) -> None:
    owners, free, columns = case
    best = min(
        cost(columns, owners | dict(zip(free, one, strict=True)))
        for one in itertools.product("ab", repeat=len(free))
    )
    assert cost(columns, owners | cut(ring(owners, free, columns))) == best


@settings(deadline=None, max_examples=200)
@given(cases(("a", "b", "c"), now=("driver", "a", "b", "c")))
def test_it_is_never_worse_than_it_was_and_no_hop_goes_to_the_driver(case: Case) -> None:
    owners, free, columns = case
    graph = ring(owners, free, columns)
    found = cut(graph)
    assert list(found) == free
    assert cost(columns, owners | found) <= cost(columns, owners)
    assert cost(columns, owners) == crossing(nets(graph), owners)
    assert all(found[name] in (owners[name], "a", "b", "c") for name in free)


# --- what is claimed ---------------------------------------------------------------------------------------


def crossing_of(overrides: Iterable[str], off: Iterable[str] = ()) -> float:
    """Bytes a step between processes, of a compiled quickstart; its weights are 269,030,016 of them."""
    plan = compile_file(QUICKSTART, ["budgets={}", *overrides], off=list(off))
    fields = [(s, f) for s in plan.seams for f in s.fields]
    return (
        sum(f.mean_bytes for s, f in fields if plan.hops[f.producer].owner != plan.hops[s.reader].owner)
        - 269_030_016
    )


@pytest.mark.parametrize(
    ("off", "now", "better"),
    [
        ([], "trainer", "trainer"),
        (["fuse"], "trainer", "rollout"),
        (["place"], "driver", "trainer"),
        (list(PASSES), "driver", "driver"),
    ],
)
def test_what_it_saves_is_what_a_plan_with_those_owners_saves(off: list[str], now: str, better: str) -> None:
    """Fused with the learner, the reward reads nothing that does not cross anyway; not fused, it reads it twice."""
    loaded = load(QUICKSTART)
    assert loaded.graph is not None
    found = placement(loaded.graph, off)
    assert found.hops == (Suggestion("reward", now, better),)
    assert found.before == crossing_of([], off)
    assert found.after == crossing_of([f"hops.reward.owner={better}"], off)
    assert (found.after < found.before) == (now != better)
    others = [crossing_of([f"hops.reward.owner={one}"], off) for one in ("rollout", "trainer")]
    assert found.after <= min(others)


def test_the_plan_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that the cut takes for cheaper, and that costs the fused group."""
    monkeypatch.setattr(placing, "cut", lambda graph, *, fused: {"reward": "rollout"})
    loaded = load(QUICKSTART)
    assert loaded.graph is not None
    found = placement(loaded.graph)
    assert found.hops == (Suggestion("reward", "trainer", "trainer"),)
    assert found.before == found.after == crossing_of([]) < crossing_of(["hops.reward.owner=rollout"])


def test_the_text_says_where_each_hop_goes_and_how() -> None:
    hops = (Suggestion("score", "driver", "rollout"), Suggestion("advantage", "trainer", "trainer"))
    assert placing.render(Placement("ring", hops, 2500, 500)) == (
        "ring: hops that nobody placed, by minimum cut over the bytes between processes\n"
        "  score      driver  → rollout\n"
        "  advantage  trainer  stays\n"
        "between processes, without weights: 2.50 KB → 500 B a step\n"
        "saves 2.00 KB a step: --set hops.score.owner=rollout --set hops.advantage.owner=trainer\n"
    )
    assert placing.render(Placement("ring", hops[1:], 500, 500)).endswith("500 B a step\n")
    assert placing.render(Placement("ring", (), 0, 0)) == (
        "ring: every hop has an owner, in the graph or in its decorator\n"
    )


def test_explain_place_prints_it_for_people_and_programs() -> None:
    arguments = ["explain", QUICKSTART, "--place", "--no-pass", "fuse"]
    text = CliRunner().invoke(main, arguments).stdout
    made = msgspec.json.decode(CliRunner().invoke(main, [*arguments, "--json"]).stdout, type=Placement)
    assert text == placing.render(made)
    assert "--set hops.reward.owner=rollout" in text
