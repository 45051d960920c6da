"""`processes:` of an owner: what may stand there, what runs, and what is said of the rest before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
from jaxtyping import Float32, Int32, Int64

import flowgraph
from flowgraph import Array, Json, Learner, Tensors, effect
from flowgraph.models import facts
from flowgraph.passes.ranks import unrunnable
from flowgraph.plan.bill import memory
from flowgraph.plan.plan import Plan

QUICKSTART = str(Path(__file__).parents[2] / "graphs" / "quickstart.yaml")


def found(*sets: str) -> list[tuple[str, str, str]]:
    """(code, message, help) of all findings, those before a run too."""
    loaded = flowgraph.load(QUICKSTART, sets)
    whole = loaded.diagnostics or (unrunnable(loaded.graph) if loaded.graph else [])
    return [(d.code, d.message, d.help) for d in whole]


def compiled(*sets: str) -> Plan:
    return flowgraph.compile(QUICKSTART, [*sets, "budgets={}"])


@pytest.mark.parametrize(
    ("sets", "code", "said", "help"),
    [
        (
            "owners.rollout.processes=2",
            "FG106",
            "owner rollout asks for 2 processes, and has no learner whose work they could share",
            "write processes: 1, or give it a learner:; an engine has processes of its own under engine:",
        ),
        (
            "owners.trainer.processes=0",
            "FG106",
            "owners.trainer.processes: expected `int` >= 1",
            "write a whole",
        ),
        (
            "owners.trainer.processes=65",
            "FG106",
            "owners.trainer.ranks.trajectory splits 64 of trajectory into 65 parts",
            "write 64, or less",
        ),
        (
            "owners.trainer.ranks={trajectory: 2, token: 2}",
            "FG114",
            "owner trainer splits its work by token too, and only trajectories are shared out in a run",
            "leave token out of ranks: of trainer to run it",
        ),
        (
            "owners.rollout.ranks={trajectory: 2}",
            "FG114",
            "owner rollout has 2 ranks, and no learner whose work they could share",
            "remove ranks: of rollout to run it",
        ),
    ],
)
def test_what_no_processes_can_share_is_named(sets: str, code: str, said: str, help: str) -> None:
    ((found_code, message, advice),) = found(sets)
    assert (found_code, message) == (code, said)
    assert advice.startswith(help)


def test_to_say_it_twice_is_refused() -> None:
    ((code, message, help),) = found("owners.trainer.ranks={trajectory: 2}", "owners.trainer.processes=2")
    assert (code, message) == ("FG106", "owners.trainer.processes says again what ranks: of trainer say")
    assert help.startswith("write ranks: alone")


def test_both_spellings_are_one_plan() -> None:
    assert compiled("owners.trainer.processes=2") == compiled("owners.trainer.ranks={trajectory: 2}")
    assert compiled("owners.trainer.processes=1") == compiled()
    assert found("owners.trainer.processes=2", "budgets={}") == []


# --- hops whose work can't be shared -----------------------------------------------------------------------------


class Said(NamedTuple):
    words: Annotated[list[Any], Json("leaf")]


@effect(uses=Learner, owner="trainer", lifetime="step")
def words(tokens: Int32[Array, "token"], *, learner: Learner) -> Said:
    return Said([])


@effect(uses=Learner, owner="trainer", lifetime="consumed")
def each(tokens: Int32[Array, "token"], *, learner: Learner) -> Float32[Array, ""]:
    return tokens.astype("float32").mean()


class Both(NamedTuple):
    weights: Annotated[dict[str, Any], Tensors()]
    values: Float32[Array, "token"]


@effect(uses=Learner, owner="trainer", lifetime="version")
def both(tokens: Int32[Array, "token"], *, learner: Learner) -> Both:
    return Both({}, tokens.astype("float32"))


class Square(NamedTuple):
    pairs: Float32[Array, "leaf leaf"]


@effect(uses=Learner, owner="trainer", lifetime="step")
def square(leaf_offsets: Int64[Array, "leaf+1"], *, learner: Learner) -> Square:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "hop", "reads", "said"),
    [
        ("more", "words", "tokens: batch", "gives words as json[leaf]"),
        ("more", "each", "tokens: rollout", "works on trajectory rows"),
        ("train", "both", "tokens: batch", "gives values, a value for each row, beside a set of tensors"),
        ("more", "square", "leaf_offsets: batch", "gives pairs as f32[leaf, leaf]"),
    ],
)
def test_a_hop_that_ranks_can_not_share_is_named_before_a_run(
    name: str, hop: str, reads: str, said: str
) -> None:
    add = f"hops.{name}={{use: {__name__}.{hop}, in: {{{reads}}}}}"
    assert found(add, "budgets={}") == [], "one process runs it"
    (one,) = found(add, "budgets={}", "owners.trainer.processes=2")
    assert one[0] == "FG114"
    assert one[1].startswith(f"hop {name} {said}")
    assert one[1].endswith("and its learner is 2 processes")
    assert one[2] == "give trainer one process, or the hop another owner"


# --- what they hold ----------------------------------------------------------------------------------------------


@pytest.fixture
def parameters(smollm2: str) -> int:
    model = facts("smollm2-135m")
    assert model is not None
    return model.parameters


def test_processes_hold_a_shard_each_and_the_first_the_weights_that_it_gives(parameters: int) -> None:
    parts = dict(memory(compiled("owners.trainer.processes=4"), "trainer").parts)
    assert parts["learner weights"] == parts["gradients"] == 4 * parameters, "in float32"
    assert parts["moments"] == 8 * parameters
    assert parts["given weights"] == 2 * parameters
    assert "master weights" not in parts


def test_the_owner_is_shown_with_its_processes() -> None:
    plan = compiled("owners.trainer.processes=2")
    assert "trainer (learner, 2 processes)" in str(flowgraph.draw(plan, "table"))
    drawn = str(flowgraph.draw(plan, "svg"))
    assert drawn.count("trainer · learner, 2 processes<") == 1, "in the legend"
    assert drawn.count("trainer · learner ×2<") == 1, "on train, which fires on both, and not on reward"
