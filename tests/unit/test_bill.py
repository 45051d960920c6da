"""The bill's arithmetic, by hand: traffic of processes, memory of engine and learner, amounts as they are written."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.errors import CheckError
from flowgraph.learners.registry import LoraOptions
from flowgraph.models import facts
from flowgraph.plan.bill import bill, traffic
from flowgraph.plan.compile import compile_file
from flowgraph.plan.plan import Plan
from flowgraph.spec.units import BYTES, enough, read_amount, size_text
from tests.unit import plans

GRAPH = str(Path(__file__).parents[2] / "graphs" / "quickstart.yaml")
PARAMETERS = 49152 * 576 + 30 * (2 * 576 + 3 * 1536 * 576 + 2 * 192 * 576 + 2 * 576 * 576) + 576
MODELS = ("rollout.engine", "trainer.learner")


@pytest.fixture(scope="module")
def quickstart() -> Plan:
    return compile_file(GRAPH)


def test_traffic_is_what_one_side_of_a_process_wrote_and_the_other_reads() -> None:
    plan = plans.plan(
        [
            plans.seam("a", "b", plans.field("a", mean=10, most=20)),  # driver → rollout
            plans.seam("b", "c", plans.field("b", mean=5, most=5), plans.field("a", "y", mean=2, most=4)),
            plans.seam("c", "d", plans.field("c", mean=100, most=100)),  # trainer → driver
            plans.seam("d", "a", plans.field("a", "z", mean=1000, most=1000)),  # driver → driver
        ],
        owners=("driver", "rollout", "trainer"),
    )
    driver, rollout, trainer = (traffic(plan, owner) for owner in ("driver", "rollout", "trainer"))
    assert (driver.mean, driver.max) == (10 + 2 + 100, 20 + 4 + 100)
    assert driver.parts == (("c → d", 100), ("a → b", 10), ("b → c", 2))
    assert (rollout.mean, trainer.mean) == (10 + 5, 5 + 2 + 100)
    costs = bill(plan)
    assert costs.traffic == {"driver": driver, "rollout": rollout, "trainer": trainer}
    assert (costs.seams["b", "c"].mean, costs.seams["b", "c"].parts) == (7, (("x", 5), ("y", 2)))
    assert costs.transports["shared memory"].mean == 10 + 7 + 100 + 1000


def test_an_engine_holds_weights_and_a_cache_of_every_slot(quickstart: Plan) -> None:
    costs = bill(quickstart)
    token = 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, width, bytes
    parts = dict(costs.memory["rollout"].parts)
    assert parts["engine weights"] == PARAMETERS * 2
    assert parts["KV cache"] == 64 * (48 + 8) * token
    assert parts["cached prefixes"] == 64 * (48 * token + 49152 * 2)
    assert costs.memory["rollout"].max == sum(parts.values())
    assert costs.memory["rollout"].priced


def test_an_engine_that_records_holds_a_row_for_each_token_that_a_slot_may_have() -> None:
    tokens = 64 * (2 * 16 + 32)  # of each slot; a prompt is in the cache of prefixes, and may be out of it
    for name, size in (("tiny-moe", 1), ("tiny-moe-300", 2)):
        plan = compile_file(
            GRAPH.replace("quickstart", "moe_r3"), [f"owners.{owner}.model={name}" for owner in MODELS]
        )
        model = facts(name)
        assert model is not None
        assert model.top_k is not None
        parts = dict(bill(plan).memory["rollout"].parts)
        assert parts["recorded choices"] == tokens * model.layers * model.top_k * size


def test_a_learner_holds_weights_gradients_masters_and_two_moments(quickstart: Plan) -> None:
    parts = dict(bill(quickstart).memory["trainer"].parts)
    assert parts["learner weights"] == parts["gradients"] == PARAMETERS * 2
    assert (parts["master weights"], parts["moments"]) == (PARAMETERS * 4, PARAMETERS * 8)
    owners = dict(quickstart.owners)
    assert owners["trainer"].learner is not None
    exact = msgspec.structs.replace(owners["trainer"].learner, dtype="float32")
    owners["trainer"] = msgspec.structs.replace(owners["trainer"], learner=exact)
    parts = dict(bill(msgspec.structs.replace(quickstart, owners=owners)).memory["trainer"].parts)
    assert "master weights" not in parts
    assert parts["learner weights"] == PARAMETERS * 4
    assert "given weights" not in parts
    other = msgspec.structs.replace(exact, weights_dtype="bfloat16")
    owners["trainer"] = msgspec.structs.replace(owners["trainer"], learner=other)
    parts = dict(bill(msgspec.structs.replace(quickstart, owners=owners)).memory["trainer"].parts)
    assert parts["given weights"] == PARAMETERS * 2


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (None, 3 * 1536 * 576 + 2 * 192 * 576 + 2 * 576 * 576),
        (("q_proj", "self_attn.k_proj"), (576 + 192) * 576),
    ],
)
def test_one_process_with_adapters_holds_a_copy_of_what_they_are_added_to(
    quickstart: Plan, targets: tuple[str, ...] | None, adapted: int
) -> None:
    owners = dict(quickstart.owners)
    assert owners["trainer"].learner is not None
    options = msgspec.structs.replace(owners["trainer"].learner, lora=LoraOptions(8, 16, targets))
    owners["trainer"] = msgspec.structs.replace(owners["trainer"], learner=options)
    parts = dict(bill(msgspec.structs.replace(quickstart, owners=owners)).memory["trainer"].parts)
    assert parts["given weights"] == 30 * adapted * 2
    assert not {"gradients", "master weights", "moments"} & parts.keys()


def test_arenas_are_the_blocks_of_all_hops(quickstart: Plan) -> None:
    costs = bill(quickstart)
    assert costs.arenas.max == sum(owner.arena_bytes for owner in quickstart.owners.values())
    assert costs.arenas.parts[0][0] == "blocks of train"
    assert costs.arenas.parts[0][1] >= 2 * PARAMETERS * 2
    blocks = {name: nbytes for m in costs.memory.values() for name, nbytes in m.parts if "blocks" in name}
    assert blocks == dict(costs.arenas.parts)


def test_a_model_that_is_not_pulled_leaves_its_owner_without_a_price() -> None:
    plan = plans.plan([], ["a", "b"], owners=("driver", "rollout"))
    unknown = msgspec.structs.replace(plan.owners["rollout"].engine, model="nobody/nothing")  # type: ignore[type-var]
    owners = plan.owners | {"rollout": msgspec.structs.replace(plan.owners["rollout"], engine=unknown)}
    memory = bill(msgspec.structs.replace(plan, owners=owners)).memory
    assert (memory["rollout"].priced, memory["rollout"].max) == (False, 64)
    assert memory["driver"].priced


@pytest.mark.parametrize(
    ("budget", "finding"),
    [
        ("{driver: 8455 B/step}", "driver moves 8.46 KB a step, 1 B over its budget of 8455 B/step"),
        ("{driver: 600 KB}", "driver holds up to 610 KB, 10.3 KB over"),
        ("{'train -> sync': 269 MB/step}", "train -> sync moves 269 MB a step, 30.0 KB over"),
        ("{'batch -> advantage': 0 B/step}", "batch -> advantage moves 512 B a step, 512 B over"),
    ],
)
def test_what_is_over_its_budget_says_by_how_much(budget: str, finding: str) -> None:
    with pytest.raises(CheckError) as caught:
        compile_file(GRAPH, [f"budgets={budget}"])
    assert [d.code for d in caught.value.diagnostics] == ["FG502"]
    assert caught.value.diagnostics[0].message.startswith(finding)


def test_a_budget_holds_to_its_last_byte() -> None:
    prompt, key, ids, truth = 64 * 38 * 2, 64 * 8, 2 * 64 * 8, 8 * 256
    driver = prompt + key + ids + truth + 8  # the batch's number
    budgets = f"budgets={{driver: [{driver} B/step, 610304 B], batch → advantage: 512 B/step, in process: 0 B/step}}"
    compile_file(GRAPH, [budgets])


def test_what_only_passes_through_the_driver_is_named_with_what_makes_it_smaller() -> None:
    toy = str(Path(__file__).parents[1] / "runtime" / "toy.yaml")
    with pytest.raises(CheckError) as caught:
        compile_file(toy, ["budgets={driver: 1 KB}", "dims.response.max=4000"], off=["defer"])
    (found,) = caught.value.diagnostics
    assert ": blocks of rollout passing through " in found.message
    assert found.help.startswith(
        "no pass and no dim brings it under, 17.8 KB is the least: write less in rollout"
    )


def test_raising_a_budget_as_the_help_says_is_enough(quickstart: Plan) -> None:
    with pytest.raises(CheckError) as caught:
        compile_file(GRAPH, ["budgets={driver: [1 B/step, 1 B], shared memory: 1 B/step, /dev/shm: 1}"])
    helps = [d.help.rpartition("to ")[2] for d in caught.value.diagnostics]
    assert len(helps) == 4
    budget = f"{{driver: [{helps[0]}, {helps[1]}], shared memory: {helps[2]}, /dev/shm: {helps[3]}}}"
    compile_file(GRAPH, [f"budgets={budget}"])


@pytest.mark.parametrize(
    ("text", "nbytes", "step"),
    [
        ("64 KB/step", 64_000, True),
        ("2GB", 2e9, False),
        (" 1.5 MiB / step ", 1.5 * 2**20, True),
        ("0 B", 0, False),
        ("0.1 KB", 100, False),
        ("3 TiB", 3 * 2**40, False),
    ],
)
def test_an_amount_is_a_number_and_a_unit(text: str, nbytes: float, step: bool) -> None:
    amount = read_amount(text)
    assert amount is not None
    assert (amount.nbytes, amount.per_step) == (nbytes, step)


@pytest.mark.parametrize(
    "text", ["", "64", "KB", "-1 KB", "1e3 B", "1 kb", "1 KB/s", "1,5 KB", "１ KB", "1 KB\n/step"]
)
def test_anything_else_is_no_amount(text: str) -> None:
    assert read_amount(text) is None


@given(st.floats(0, 1e17))
def test_enough_is_enough_and_hardly_more(nbytes: float) -> None:
    amount = read_amount(enough(nbytes))
    assert amount is not None
    assert nbytes <= amount.nbytes <= 1.11 * math.ceil(nbytes)


@given(st.integers(1, 999), st.sampled_from([u for u in BYTES if "i" not in u]))
def test_what_is_printed_can_be_read_again(number: int, unit: str) -> None:
    amount = read_amount(size_text(number * BYTES[unit]))
    assert amount is not None
    assert amount.nbytes == number * BYTES[unit]


def test_what_no_hop_uses_costs_nothing() -> None:
    plan = compile_file(GRAPH, ["budgets={in process: 0 B/step}"])
    assert "in process" not in bill(plan).transports
