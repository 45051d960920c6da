"""The census, worked out by hand: what the toy and the quickstart keep, how much of it, and what it crosses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from flowgraph.cli import main
from flowgraph.engines.registry import TransformersOptions
from flowgraph.plan.compile import compile_file
from flowgraph.report.census import Census, State, census, render_table
from hops.pace import Pace
from tests.unit import plans

ROOT = Path(__file__).parents[2]
QUICKSTART, TOY = str(ROOT / "graphs/quickstart.yaml"), str(ROOT / "tests/runtime/toy.yaml")
PARAMETERS = 134_515_008


@pytest.fixture(scope="module")
def quickstart() -> Census:
    return census(compile_file(QUICKSTART))


@pytest.fixture(scope="module")
def toy() -> Census:
    return census(compile_file(TOY))


def of(found: Census, name: str) -> State:
    return next(s for s in found.states if s.name.partition(",")[0] == name)


# msgpack: a map of up to 15 is 1 byte and its entries, a text of up to 31 its length and 1, a large int 5.
GROUP = 1 + (5 + 6) + (4 + 5) + (8 + 1) + (4 + 5) + (5 + 1 + 7 + 1) + (7 + 1)  # …, tag, dims {prompt}, failed
TRAJECTORY = (
    1 + (5 + 11) + (4 + 5) + (8 + 1 + GROUP) + (4 + 5) + (5 + 1 + 6 + 1 + 5 + 1) + (7 + 1)
)  # dims {token, leaf}


def test_a_fold_keeps_its_empty_state_and_the_rows_that_it_has_room_for(quickstart: Census) -> None:
    cursor = of(quickstart, "fold dataset")
    assert (cursor.parts, cursor.nbytes) == (("at", "epoch"), 1 + 3 + 1 + 6 + 1)
    dispatch = of(quickstart, "fold dispatch")
    empty = 1 + (6 + 1) + (8 + 1) + (10 + 1) + (11 + 1) + (8 + 1) + (5 + 1)
    pace = 5 + len(msgspec.msgpack.encode(Pace()))
    assert dispatch.parts == ("group", "sampled", "in_flight", "dispatched", "dropped", "held", "pace")
    assert dispatch.nbytes == empty + pace - 1 + GROUP
    buffer = of(quickstart, "fold buffer")
    assert (buffer.parts, buffer.exact, buffer.nbytes) == (("held",), True, 1 + 5 + 1)


def test_a_field_that_grows_and_is_no_row_makes_the_sum_a_lower_bound(quickstart: Census) -> None:
    assert [s.name for s in quickstart.states if not s.exact] == ["fold batch"]
    assert not quickstart.exact


def test_the_tables_of_the_driver_grow_with_the_rows_that_live(toy: Census) -> None:
    assert of(toy, "ledger").nbytes == 14 * (5 + 10) + (1 + 11 + 5 + 10 + 5 + 6 + 5 + 9 + 5 + 8 + 1)
    assert of(toy, "table of rows").parts == ("group", "trajectory", "step")
    assert of(toy, "firings under way").crosses == ("concurrency", "crash")


def test_blocks_are_slots_times_their_size_and_hops_that_fire_as_one_keep_none(toy: Census) -> None:
    sizes = {s.name: s.nbytes for s in toy.states if s.name.startswith("blocks")}
    assert sizes == {
        "blocks of dataset, until consumed": (2 * 2 + 2) * 4224,
        "blocks of dispatch, until consumed": (2 * 6 + 2) * 128,
        "blocks of rollout, until consumed": (2 * 6 + 2) * 192,
        "blocks of batch, until step": 3 * 128,
        "blocks of train, until version": 3 * 128,
    }
    assert sum(sizes.values()) == sum(o.arena_bytes for o in compile_file(TOY).owners.values())


def test_engine_and_learner_keep_what_the_model_says(quickstart: Census) -> None:
    sizes = {s.name: s.nbytes for s in quickstart.states[-6:]}
    token = 30 * 2 * 3 * 64 * 2
    assert sizes == {
        "engine weights": 2 * PARAMETERS,
        "KV cache": 64 * 56 * token,
        "cached prefixes": 64 * (48 * token + 2 * 49152),
        "learner weights": 2 * PARAMETERS,
        "master weights": 4 * PARAMETERS,
        "moments": 8 * PARAMETERS,
    }


def test_every_state_says_what_it_crosses_and_what_restores_it(quickstart: Census) -> None:
    expected = {
        "fold dataset": ("crash",),
        "fold dispatch": ("crash",),
        "fold buffer": ("crash",),
        "fold batch": ("crash",),
        "table of rows": ("crash",),
        "ledger": ("crash",),
        "firings under way": ("concurrency", "crash"),
        "version of sync": ("process", "crash"),
        "blocks of dataset": ("concurrency", "process", "crash"),
        "blocks of dispatch": ("concurrency", "process", "crash"),
        "blocks of rollout": ("concurrency", "process"),
        "blocks of batch": (
            "concurrency",
            "process",
            "crash",
        ),  # sync reads its batch_id, and may run side by side
        "blocks of train": ("concurrency", "process"),
        "engine weights": ("concurrency", "crash"),
        "KV cache": ("concurrency",),
        "cached prefixes": ("concurrency",),
        "learner weights": ("crash", "run"),
        "master weights": ("crash",),
        "moments": ("crash",),
    }
    assert {s.name.partition(",")[0]: s.crosses for s in quickstart.states} == expected
    assert quickstart.complexity == sum(map(len, expected.values())) == 31
    assert of(quickstart, "engine weights").restored == "the next sync"
    assert of(quickstart, "version of sync").restored == "the next sync"
    assert of(quickstart, "fold buffer").restored == "a new run, from step 0"
    assert of(quickstart, "blocks of rollout").restored == "the driver holds them"
    assert quickstart.nbytes == sum(s.nbytes for s in quickstart.states)


def test_a_ring_in_one_process_crosses_no_process(toy: Census) -> None:
    owners = {
        f"hops.{hop}.owner=driver" for hop in ("rollout", "reward", "advantage", "train", "sync", "eval")
    }
    alone = census(compile_file(TOY, ["owners={}", *sorted(owners)]))
    assert "process" in {b for s in toy.states for b in s.crosses}
    assert "process" not in {b for s in alone.states for b in s.crosses}
    assert alone.complexity < toy.complexity


def test_more_lag_is_more_state_and_no_more_crossings(toy: Census) -> None:
    late = census(compile_file(TOY, ["hops.dispatch.in.version.max_lag=2"]))
    assert late.nbytes > 1.5 * toy.nbytes
    assert late.complexity == toy.complexity


def test_a_model_that_is_not_pulled_makes_the_sum_a_lower_bound() -> None:
    plan = plans.plan([], ["a", "b"], owners=("driver", "rollout"))
    engine = TransformersOptions("nobody/nothing")
    owners = {
        "driver": plan.owners["driver"],
        "rollout": msgspec.structs.replace(plan.owners["rollout"], engine=engine),
    }
    found = census(msgspec.structs.replace(plan, owners=owners))
    assert {s.name: s.nbytes for s in found.states if not s.exact} == {
        "engine weights": 0,
        "KV cache": 0,
        "cached prefixes": 0,
    }


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_fits_its_width_and_ends_with_the_sum(quickstart: Census, width: int) -> None:
    text = render_table(quickstart, width)
    assert max(map(len, text.splitlines())) <= width
    said = " ".join(text.split())
    assert "19 states, 2.85 GB+?; complexity 31 = concurrency 9, process 6, crash 15, run 1" in said
    assert text.count("●") == 31


def test_check_state_prints_the_census_for_people_and_programs(toy: Census) -> None:
    shown = CliRunner().invoke(main, ["check", TOY, "--state"])
    assert shown.exit_code == 0
    assert "13 states" in shown.stdout
    made = json.loads(CliRunner().invoke(main, ["check", TOY, "--state", "--json"]).stdout)
    assert made["complexity"] == toy.complexity
    assert [s["name"] for s in made["states"]] == [s.name for s in toy.states]


def test_check_state_of_a_graph_with_findings_prints_the_findings() -> None:
    result = CliRunner().invoke(main, ["check", TOY, "--state", "--set", "hops.train.in.lag=none"])
    assert result.exit_code == 1
    assert "error[FG108]" in result.stderr
