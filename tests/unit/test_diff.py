"""What `flowgraph diff` says of two plans: everything that differs, once, and nothing of what is equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph.cli import main
from flowgraph.plan.compile import compile_file
from flowgraph.plan.plan import Hop, Plan, Seam
from flowgraph.report.diff import Difference, diff, to_json
from flowgraph.spec.dims import Size
from tests.unit import plans

ROOT = Path(__file__).parents[2]
TOY = str(ROOT / "tests/runtime/toy.yaml")
QUICKSTART = str(ROOT / "graphs/quickstart.yaml")
PROBE = (
    "hops.probe={use: tests.parity.probe.fingerprint, owner: trainer, in: {tokens: batch, logprobs: batch, "
)
PROBE += "response_mask: batch, score: reward, advantages: advantage}}"


@pytest.fixture(scope="module")
def toy() -> Plan:
    return compile_file(TOY)


def toy_with(*overrides: str) -> Plan:
    return compile_file(TOY, overrides)


def hop_with(plan: Plan, name: str, **facts: Any) -> Plan:
    hop: Hop = msgspec.structs.replace(plan.hops[name], **facts)
    return msgspec.structs.replace(plan, hops=plan.hops | {name: hop})


@pytest.mark.parametrize("graph", [TOY, QUICKSTART])
def test_a_plan_does_not_differ_from_itself(graph: str) -> None:
    found = diff(compile_file(graph), compile_file(graph))
    assert not found
    assert str(found) == "no difference\n"


def test_names_and_docs_do_not_count(toy: Plan) -> None:
    assert not diff(toy, toy_with("graph=other", "doc=a doc"))


def test_the_text_has_a_section_for_each_kind_of_change_and_lines_up() -> None:
    def ring(tokens: float, *more: Seam, owner: str = "trainer", stop: str = "x", **dims: Size) -> Plan:
        seams = [plans.seam("rollout", "train", plans.field("rollout", "tokens", tokens, 9999)), *more]
        made = plans.plan(seams, owners=["rollout", owner], dims={"group": Size(8, 8), **dims})
        return hop_with(made, "rollout", config={"stop": [stop], "options": {"deep": 1, "same": 2}})

    probe = plans.seam("rollout", "probe", plans.field("rollout", "tokens", 500, 999))
    late = plans.seam("train", "rollout", control=["_version"], delay=1, max_lag=0)
    before = ring(1000, late, prompt=Size(38, 48))
    after = ring(2000, probe, owner="driver", stop="y", prompt=Size(40, 48), token=Size(6, 6))
    owners = {**after.owners, "driver": msgspec.structs.replace(after.owners["driver"], arena_bytes=4096)}
    assert str(diff(before, msgspec.structs.replace(after, owners=owners))) == TEXT


TEXT = """\
settings
  ~ dims.prompt  {mean: 38, max: 48} → {mean: 40, max: 48}
  + dims.token   6

hops
  ~ rollout  with.stop ["x"] → ["y"]
  ~ train    owner trainer → driver
  + probe    hops.test.probe, owner rollout

ports
  - rollout.in._version  queue from train._version

seams, mean bytes a step
  ~ rollout → train  1.00 KB → 2.00 KB (+100.0%)
  - train → rollout  control, until consumed, delay 1
  + rollout → probe  500 B, shared memory, until consumed

memory of owners
  ~ driver  0 B → 4.10 KB
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("dims.group=4", "  ~ dims.group  2 → 4"),
        ("dims.response.max=5", "  ~ dims.response  {mean: 2, max: 4} → {mean: 2, max: 5}"),
        ("run.steps=7", "  ~ run.steps  6 → 7"),
        ("run.show=[train.loss]", '  ~ run.show  ["reward.reward", "train.loss"] → ["train.loss"]'),
        ("owners.trainer.threads=2", "  ~ owners.trainer.threads  1 → 2"),
        ("hops.rollout.with.jitter=0.5", "  ~ rollout  with.jitter 0.01 → 0.5"),
        ("hops.rollout.with={}", "  ~ rollout  with.jitter 0.01 → (not set)"),
        ("hops.reward.owner=rollout", "  ~ reward  owner trainer → rollout"),
        ("hops.dataset.capacity=64", "  ~ dataset  queue 1 → 64"),
        ("hops.eval.in.version.every=3", "  ~ sync → eval  every 2 → 3"),
    ],
)
def test_one_change_is_named_with_its_old_and_new_value(toy: Plan, override: str, said: str) -> None:
    assert said in str(diff(toy, toy_with(override))).splitlines()


def test_a_hop_that_comes_brings_its_seams_and_no_ports(toy: Plan) -> None:
    without = compile_file(QUICKSTART)
    with_probe = compile_file(QUICKSTART, [PROBE])
    came, went = diff(without, with_probe), diff(with_probe, without)
    assert [(c.name, c.before, c.after.use if c.after else "") for c in came.hops] == [
        ("probe", None, "tests.parity.probe.fingerprint")
    ]
    new = [c.name for c in came.seams if c.before is None]
    assert new == ["batch → probe", "reward → probe", "advantage → probe"]
    # It fires with train, and before it: what both read is read by the probe.
    assert [c.name for c in came.seams if c.name not in new] == ["batch → train"]
    assert not came.ports
    assert [(c.name, c.before, c.after) for c in went.seams] == [
        (c.name, c.after, c.before) for c in came.seams
    ]


def test_bytes_of_a_seam_are_those_that_the_plans_have(toy: Plan) -> None:
    longer = toy_with("dims.response={mean: 4, max: 4}")
    priced = [
        {f"{s.source} → {s.reader}": s.mean_bytes for s in plan.seams if s.mean_bytes}
        for plan in (toy, longer)
    ]
    grew = {
        name: (nbytes, priced[1][name]) for name, nbytes in priced[0].items() if nbytes != priced[1][name]
    }
    found = {c.name: (c.before.mean, c.after.mean) for c in diff(toy, longer).seams if c.before and c.after}
    assert found == grew
    assert "batch → reward" in grew
    assert all(a < b for a, b in grew.values())


def test_an_owner_may_change_how_a_seam_is_crossed(toy: Plan) -> None:
    lines = str(diff(toy, toy_with("hops.reward.owner=rollout"))).splitlines()
    assert "  ~ reward → advantage  0 B → 60 B, fused → shared memory" in lines


def test_a_port_differs_by_type_fact_or_source(toy: Plan) -> None:
    mask = toy.hops["rollout"].column("response_mask")
    columns = tuple(
        msgspec.structs.replace(c, type="i64[token]") if c.name == "tokens" else c
        for c in toy.hops["rollout"].columns
        if c != mask
    )
    columns += (msgspec.structs.replace(mask, facts=()),)
    watches = tuple(msgspec.structs.replace(w, producer="sync") for w in toy.hops["buffer"].watches[:1])
    changed = hop_with(hop_with(toy, "rollout", columns=columns), "buffer", watches=watches)
    assert str(diff(toy, changed)) == (
        "ports\n"
        "  ~ rollout.tokens         i32[token] → i64[token]\n"
        "  ~ rollout.response_mask  bool[token] Mask → bool[token]\n"
        "  ~ buffer.in.trajectory   trajectory rows from rollout.rows → trajectory rows from sync.rows\n"
        "  - buffer.in.taken        step rows, event from batch.leaves\n"
        "  - buffer.in.dropped      event from batch.dropped\n"
    )


def test_what_rounding_hides_is_shown_as_a_difference() -> None:
    def one(mean: float, most: int = 0, priced: bool = True) -> Plan:
        return plans.plan([plans.seam("a", "b", plans.field("a", "x", mean, most, priced=priced))])

    def said(before: Plan, after: Plan) -> str:
        return str(diff(before, after)).splitlines()[1]

    assert said(one(538_104_512), one(538_207_360)) == "  ~ a → b  538 MB → 538 MB (+103 KB)"
    assert said(one(1000), one(500)) == "  ~ a → b  1.00 KB → 500 B (-50.0%)"
    assert said(one(0), one(500)) == "  ~ a → b  0 B → 500 B"
    assert said(one(100, 200), one(100, 300)) == "  ~ a → b  at most 200 B → 300 B (+50.0%)"
    assert said(one(0, priced=False), one(500)) == "  ~ a → b  unpriced → 500 B"


def test_json_holds_the_whole_difference(toy: Plan) -> None:
    found = diff(toy, toy_with("dims.group=4", "hops.rollout.with.jitter=0.5"))
    assert msgspec.json.decode(to_json(found), type=Difference) == found


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "dims.group": st.integers(1, 3),
        "dims.leaf": st.integers(1, 3),
        "run.steps": st.integers(5, 7),
        "hops.rollout.with.jitter": st.sampled_from([0.01, 0.5]),
        "hops.reward.owner": st.sampled_from(["rollout", "trainer"]),
        "hops.dataset.capacity": st.integers(36, 38),
    },
)


@settings(deadline=None)
@given(CHANGES, CHANGES)
def test_two_plans_differ_exactly_when_something_is_said_and_the_same_both_ways(a: Any, b: Any) -> None:
    one, two = (toy_with(*(f"{k}={v}" for k, v in changes.items())) for changes in (a, b))
    there, back = diff(one, two), diff(two, one)
    assert bool(there) == (one != two) == (str(there) != "no difference\n")
    for name in ("settings", "hops", "ports", "seams", "memory", "budgets"):
        forth = {(c.name, repr(c.before), repr(c.after)) for c in getattr(there, name)}
        assert forth == {(c.name, repr(c.after), repr(c.before)) for c in getattr(back, name)}


LIMIT = "budgets={driver: 64 KB/step, rollout: 1 GB}"


@pytest.mark.parametrize(
    ("before", "after", "worse", "said"),
    [
        ([LIMIT], [LIMIT, "run.seed=1"], False, None),
        ([LIMIT], [LIMIT, "dims.group=4"], True, "  ~ driver/step  "),
        ([LIMIT, "dims.group=4"], [LIMIT], False, "  ~ driver/step  "),
        ([LIMIT], ["budgets={driver: 65 KB/step, rollout: 1 GB}"], True, "budget 64.0 KB → 65.0 KB"),
        ([LIMIT], ["budgets={driver: 63 KB/step, rollout: 1 GB}"], False, "budget 64.0 KB → 63.0 KB"),
        ([LIMIT], ["budgets={driver: 64 KB/step}"], True, "  ~ rollout  budget 1.00 GB → none"),
        (["budgets={driver: 64 KB/step}"], [LIMIT], False, "  ~ rollout  budget none → 1.00 GB"),
        (
            ["budgets={batch -> train: 9 MB/step}"],
            ["budgets={}"],
            True,
            "  ~ batch -> train/step  budget 9.00 MB → none",
        ),
    ],
)
def test_a_budget_is_worse_when_more_is_spent_or_it_is_raised_or_gone(
    before: list[str], after: list[str], worse: bool, said: str | None
) -> None:
    found = diff(toy_with(*before), toy_with(*after))
    assert found.worse == worse
    assert said in str(found) if said else not found.budgets


def test_the_exit_code_says_that_a_budget_got_worse(tmp_path: Path) -> None:
    text = Path(TOY).read_text()
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"{text}budgets: {{driver: 64 KB/step}}\n")
    two.write_text(f"{text}budgets: {{driver: 1 MB/step}}\n")
    codes = [
        CliRunner().invoke(main, ["diff", str(a), str(b)]).exit_code
        for a, b in ((one, two), (two, one), (one, one))
    ]
    assert codes == [1, 0, 0]
