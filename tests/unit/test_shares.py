"""Where the time of owners and hops goes, and how deep queues are, by a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.passes.pipeline import load
from flowgraph.plan.compile import compile_graph
from flowgraph.plan.plan import Plan
from flowgraph.runtime.depths import Depths, Span
from flowgraph.runtime.shares import Shares
from tests.runtime.harness import TOY

TRAIN = "reward → advantage → train"


@pytest.fixture(scope="module")
def plan() -> Plan:
    loaded = load(TOY, ())
    assert loaded.graph is not None
    return compile_graph(loaded.graph)


def test_one_synchronous_step(plan: Plan) -> None:
    """6 s of rollout, 3 of training, 1 of sync, while dispatch holds the next group back."""
    hops, shares = plan.hops, Shares(plan, 100.0)
    for _ in range(6):
        shares.begins(hops["rollout"])
    shares.look(100.0, {"dispatch"}, {"dataset"})
    for _ in range(6):
        shares.ends(hops["rollout"])
        shares.look(106.0, {"dispatch"}, {"dataset"})
    shares.begins(hops["reward"])
    shares.look(106.0, {"dispatch"}, {"dataset", "batch"})
    shares.ends(hops["reward"])
    shares.begins(hops["sync"])
    shares.look(109.0, {"dispatch"}, {"dataset", "batch"})
    got = shares.step(110.0)
    assert got == shares.run(110.0)
    assert got["owners"]["rollout"] == {"busy": 0.7, "starved": 0, "blocked": 0.3}
    assert got["owners"]["trainer"] == {"busy": 0.3, "starved": 0.7, "blocked": 0}
    assert got["hops"]["rollout"] == {"busy": 0.6, "starved": 0, "blocked": 0.4}
    assert got["hops"][TRAIN] == {"busy": 0.3, "starved": 0.7, "blocked": 0}
    assert got["hops"]["sync"] == {"busy": 0.1, "starved": 0.9, "blocked": 0}
    assert got["hops"]["batch"] == {"busy": 0, "starved": 0.6, "blocked": 0.4}
    assert got["hops"]["buffer"] == {"busy": 0, "starved": 1, "blocked": 0}
    assert shares.busy_seconds(110.0) == {"driver": 0, "rollout": 7, "trainer": 3}


def test_a_rollout_without_prompts_is_starved(plan: Plan) -> None:
    shares = Shares(plan, 0.0)
    shares.look(0.0, (), ())
    assert shares.run(2.0)["owners"]["rollout"] == {"busy": 0, "starved": 1, "blocked": 0}


def test_what_is_due_and_may_not_begin_blocks_its_hop_and_not_a_busy_owner(plan: Plan) -> None:
    shares = Shares(plan, 0.0)
    shares.begins(plan.hops["sync"])
    shares.look(0.0, {"eval"}, ())
    got = shares.run(4.0)
    assert got["hops"]["eval"]["blocked"] == got["owners"]["rollout"]["busy"] == 1


def test_what_was_sent_to_a_busy_owner_waits_for_its_turn() -> None:
    """`reward` and `train`, apart, are no coroutines: the trainer works on one at a time. `rollout` is one."""
    loaded = load(TOY, ())
    assert loaded.graph is not None
    apart = compile_graph(loaded.graph, off=["fuse"])
    shares = Shares(apart, 0.0)
    shares.begins(apart.hops["train"])
    shares.begins(apart.hops["reward"])
    shares.begins(apart.hops["rollout"])
    shares.begins(apart.hops["eval"])
    shares.look(0.0, (), ())
    shares.ends(apart.hops["train"])
    shares.look(3.0, (), ())
    got = shares.run(4.0)
    assert got["hops"]["train"] == {"busy": 0.75, "starved": 0.25, "blocked": 0}
    assert got["hops"]["reward"] == {"busy": 0.25, "starved": 0, "blocked": 0.75}
    assert (
        got["owners"]["trainer"]["busy"] == got["hops"]["eval"]["busy"] == got["hops"]["rollout"]["busy"] == 1
    )


def test_the_driver_is_busy_between_waits(plan: Plan) -> None:
    shares = Shares(plan, 0.0)
    shares.wake(0.0)
    shares.look(1.0, (), ())
    shares.wake(4.0)
    assert shares.run(5.0)["owners"]["driver"] == {"busy": 0.4, "starved": 0.6, "blocked": 0}


def test_depths_are_means_over_time_and_the_most() -> None:
    span = Span(10.0, Depths(in_flight=4))
    span.set(11.0, Depths(in_flight=2, ready=3))
    span.set(14.0, Depths(queued=1))
    assert span.told(18.0) == {
        "in_flight": {"mean": (4 * 1 + 2 * 3) / 8, "max": 4},
        "ready": {"mean": 3 * 3 / 8, "max": 3},
        "queued": {"mean": 0.5, "max": 1},
    }
    assert Span(1.0, Depths(ready=2)).told(1.0)["ready"] == {"mean": 0, "max": 2}


NAMES = st.sets(st.sampled_from(["rollout", "reward", "sync", "eval", "dispatch", "batch"]))
LOOKS = st.lists(
    st.tuples(
        st.integers(0, 36).map(lambda n: n / 4),
        st.sampled_from(["rollout", "reward", "sync", "eval"]),
        NAMES,
        NAMES,
        st.booleans(),
    ),
    max_size=12,
)


@given(LOOKS)
def test_shares_sum_to_one_and_those_of_the_steps_to_those_of_the_run(plan: Plan, looks: list[Any]) -> None:
    shares, now = Shares(plan, 5.0), 5.0
    steps: list[tuple[float, float]] = []
    began = now
    under_way: set[str] = set()
    for seconds, hop, waiting, denied, ends in looks:
        shares.wake(now)
        (shares.ends if hop in under_way else shares.begins)(plan.hops[hop])
        under_way ^= {hop}
        shares.look(now, waiting, denied)
        now += seconds
        if ends and now > began:
            got = shares.step(now)
            for named in got.values():
                assert all(sum(one.values()) == pytest.approx(1, abs=2e-3) for one in named.values())
            steps.append((now - began, got["owners"]["rollout"]["busy"]))
            began = now
    if now > began:
        steps.append((now - began, shares.step(now)["owners"]["rollout"]["busy"]))
    whole = sum(seconds * share for seconds, share in steps)
    assert whole == pytest.approx(shares.busy_seconds(now)["rollout"], abs=1e-2 * (1 + now))
