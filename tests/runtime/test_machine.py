"""Dispatch, buffer and batch under any order of finishes, failures, hangs, versions and restarts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.runtime.virtual import ENGINE, Virtual, plan_of

STEPS = 5
EARLY = (
    "hops.reward={use: tests.runtime.toy.reward, in: {tokens: rollout, leaf_offsets: rollout, ground_truth: rollout}}",
    "hops.buffer.in.trajectory=reward",
    "hops.dispatch.in.finished=reward",
)
WITHHELD = ("hops.advantage.in.withheld_score=batch", "hops.advantage.in.withheld_uid=batch")
COUNTED = "hops.batch.in.sent=dispatch"


def ring_of(
    groups: int,
    samples: int,
    max_lag: int,
    *,
    policy: str = "drop",
    whole: bool = True,
    slack: int | None = None,
    queue: int = 1,
    adapt: bool = False,
    steps: int = STEPS,
) -> list[str]:
    """Overrides of the toy ring. policy: drop, wait, withhold or equal, which drops groups of equal scores"""
    batch = groups * samples
    options: dict[str, Any] = {"groups": "whole" if whole else "partial", "patience": 1000}
    more = [*ENGINE, COUNTED]
    if policy in ("withhold", "equal"):
        more += [*EARLY, "hops.batch.in.score=buffer"]
    if policy == "withhold":
        more += ["hops.batch.use=hops.batch.withhold", "dims.withheld={mean: 0, max: 64}", *WITHHELD]
        del options["groups"]
    elif policy == "equal":
        options |= {"drop_equal": True, "groups": "whole"}
    else:
        options["stale"] = policy
    if adapt:
        more += ["hops.dispatch.in.short=batch", "hops.dispatch.in.backlog={from: rollout, delay: 1}"]
    capacity = (max_lag + 1) * batch if slack is None else min(batch + slack, (max_lag + 1) * batch)
    with_ = ", ".join(f"{k}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in options.items())
    return [
        *more,
        "hops.eval.in.version.every=2",
        f"dims.group={groups}",
        f"dims.sample={samples}",
        f"hops.dispatch.in.version.max_lag={max_lag}",
        f"hops.dispatch.with={{adapt: {str(adapt).lower()}}}",
        f"hops.buffer.with={{capacity: {capacity}}}",
        f"hops.batch.capacity={min(queue, max_lag)}",
        f"hops.batch.with={{{with_}}}",
        f"run.steps={steps}",
    ]


class Asynchronous(RuleBasedStateMachine):
    """Anything may happen at any time; at the end everything that is under way ends, and then so must the run."""

    @initialize(
        groups=st.integers(1, 3),
        samples=st.integers(1, 3),
        max_lag=st.integers(0, 3),
        policy=st.sampled_from(["drop", "wait", "wait", "withhold", "equal"]),
        whole=st.booleans(),
        slack=st.none() | st.integers(0, 9),
        queue=st.integers(0, 2),
        adapt=st.booleans(),
        scores=st.lists(st.sampled_from([0.0, 1.0]), min_size=16, max_size=16),
    )
    def start(
        self, groups: int, samples: int, max_lag: int, policy: str, whole: bool, slack: int | None, queue: int,
        adapt: bool, scores: list[float],
    ) -> None:  # fmt: skip
        # A group of one has equal scores always, and so have all when there is only one score.
        policy = "drop" if policy == "equal" and (samples == 1 or len(set(scores)) == 1) else policy
        self.policy, self.max_lag, self.size, self.adapt = policy, max_lag, groups * samples, adapt
        options: dict[str, Any] = {
            "policy": policy,
            "whole": whole,
            "slack": slack,
            "queue": queue,
            "adapt": adapt,
        }
        plan = plan_of(*ring_of(groups, samples, max_lag, **options))
        room = plan.hops["buffer"].room
        assert room is not None
        self.capacity = room
        self.flow = Virtual(plan, {key: scores[key % 16] for key in range(1000)})
        self.hung: set[int] = set()
        self.given_up = False

    # --- what may happen --------------------------------------------------------------------------------------

    def _rollouts(self) -> list[int]:
        return [key for key in self.flow.keys("rollout") if key not in self.hung]

    @precondition(lambda self: self._rollouts())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.flow.ends("rollout", data.draw(st.sampled_from(self._rollouts())))

    @precondition(lambda self: self._rollouts())
    @rule(left=st.integers(0, 2), youngest=st.booleans())
    def all_but_a_few_finish(self, left: int, youngest: bool) -> None:
        keys = sorted(self._rollouts(), reverse=youngest)
        for key in keys[left:]:
            if key in self._rollouts():
                self.flow.ends("rollout", key)

    @precondition(lambda self: self._rollouts())
    @rule(data=st.data(), reason=st.sampled_from(["time limit", "environment error"]))
    def come_to_nothing(self, data: st.DataObject, reason: str) -> None:
        self.flow.ends("rollout", data.draw(st.sampled_from(self._rollouts())), failed=reason)

    @precondition(lambda self: self._rollouts())
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        """It ends by its time limit only, at the end."""
        self.hung.add(data.draw(st.sampled_from(self._rollouts())))

    @precondition(lambda self: self._others())
    @rule(data=st.data())
    def another_hop_is_done(self, data: st.DataObject) -> None:
        self.flow.ends(*data.draw(st.sampled_from(self._others())))

    @precondition(lambda self: self._others())
    @rule()
    def training_catches_up(self) -> None:
        while others := self._others():
            self.flow.ends(*others[0])

    def _others(self) -> list[tuple[str, int]]:
        return [one for one in self.flow.firings if one[0] != "rollout"]

    @precondition(lambda self: self.flow.events)
    @rule()
    def an_evaluation_ends(self) -> None:
        self.flow.heard()

    @rule(backlog=st.integers(0, 3))
    def the_engine_says_what_waits(self, backlog: int) -> None:
        self.flow.publish("rollout", "backlog", backlog)
        self.flow.turn()

    @precondition(lambda self: self.adapt)
    @rule(to=st.integers(1, 9), backlog=st.integers(0, 1))
    def the_watermark_moves(self, to: int, backlog: int) -> None:
        pace = self.flow.state("dispatch").pace
        pace.watermark = float(min(to, self.capacity))
        self.flow.publish("rollout", "backlog", backlog)
        self.flow.turn()

    @precondition(lambda self: self.flow.told_to_stop)
    @rule()
    def one_stops(self) -> None:
        self.hung.discard(self.flow.told_to_stop[0][1])
        self.flow.stops(*self.flow.told_to_stop[0])

    @rule()
    def restart(self) -> None:
        self.flow.restart()

    # --- what always holds ------------------------------------------------------------------------------------

    @invariant()
    def every_trajectory_is_somewhere(self) -> None:
        flow = self.flow
        flow.check()
        counts = flow.ledger.counts
        at_work = len(flow.keys("rollout")) + len(
            flow.keys("reward") if self.policy in ("withhold", "equal") else []
        )
        due = sum(len(flow.ready[name]) for name in ("rollout", "reward") if name in flow.ready)
        if self.policy not in ("withhold", "equal"):
            due = len(flow.ready["rollout"])
        assert counts.in_flight == at_work + due + len(flow.parked)
        assert flow.state("dispatch").in_flight == counts.in_flight
        assert flow.state("buffer").held == counts.ready

    @invariant()
    def nothing_has_more_than_it_may(self) -> None:
        counts, flow = self.flow.ledger.counts, self.flow
        assert counts.ready <= self.capacity
        assert counts.in_flight + counts.ready <= self.capacity
        untrained = counts.in_flight + counts.ready + counts.consumed - flow.steps_done * self.size
        if self.policy == "withhold":  # what is withheld has had its place in a batch
            untrained += counts.dropped.get("withheld", 0)
        assert untrained <= (self.max_lag + 1) * self.size
        assert not flow.parked or len(flow.parked) + len(flow.told_to_stop) <= flow.hold
        if not flow.told_to_stop and self.policy not in ("withhold", "equal"):  # else some are at the reward
            assert len(flow.parked) == min(flow.hold, len(flow.parked) + len(flow.keys("rollout")))

    @invariant()
    def what_is_trained_is_trained_once_and_is_not_too_old(self) -> None:
        trained = [key for step in self.flow.taught for key in step]
        assert len(trained) == len(set(trained))
        assert max((lag for step in self.flow.lags for lag in step), default=0) <= self.max_lag
        if self.policy == "withhold":
            assert all(0 < len(step) <= self.size for step in self.flow.taught)
        else:
            assert all(len(step) == self.size for step in self.flow.taught)

    @invariant()
    def no_one_is_starved(self) -> None:
        if self.policy == "wait":
            assert "stale" not in self.flow.ledger.counts.dropped

    @invariant()
    def something_goes_on(self) -> None:
        assert self.flow.finished() or self.flow.under_way()

    def teardown(self) -> None:
        """The rest: hangs end by their time limit, the engine catches up, everything else ends, oldest first."""
        if not hasattr(self, "flow"):
            return
        flow = self.flow
        flow.publish("rollout", "backlog", 0)
        flow.turn()
        for _ in range(200 * STEPS * self.size * (self.max_lag + 2)):
            if flow.finished():
                break
            if flow.told_to_stop:
                flow.stops(*flow.told_to_stop[0])
            elif flow.events:
                flow.heard()
            else:
                hop, key = min(flow.firings, key=lambda one: (one[0] == "rollout", one[1]))
                flow.ends(hop, key, failed="time limit" if key in self.hung and hop == "rollout" else "")
        assert flow.finished(), "the run goes on"
        self.every_trajectory_is_somewhere()
        self.what_is_trained_is_trained_once_and_is_not_too_old()
        flow.end()
        counts = flow.ledger.counts
        assert counts.in_flight == counts.ready == 0
        assert counts.dispatched == counts.consumed + sum(counts.dropped.values())
        assert counts.consumed == sum(map(len, flow.taught))


def machine(examples: int) -> settings:
    """Its failing runs are not shrunk: each is a run of a few dozen events, and shrinking takes minutes."""
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    checks = [HealthCheck.too_slow]
    return settings(
        max_examples=examples,
        stateful_step_count=40,
        phases=phases,
        deadline=None,
        suppress_health_check=checks,
    )


TestAsynchronous = Asynchronous.TestCase
TestAsynchronous.settings = machine(100)


@pytest.mark.slow
def test_thousands_of_orders() -> None:
    run_state_machine_as_test(Asynchronous, settings=machine(2000))
