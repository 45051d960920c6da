"""What becomes of requests in the simulator: time limits, failures, several for one trajectory."""

from __future__ import annotations

from typing import Any

import pytest

import flowgraph
from flowgraph.simulator.ring import Ring
from flowgraph.simulator.run import endless
from flowgraph.simulator.settings import fit, make

GRAPH = "graphs/quickstart.yaml"
SECOND = "hops.second={use: hops.rollout.complete, in: {prompt: dispatch, key: dispatch}"
SPEED = {"step": 0.1, "per_request": 0.0, "prefill": 1e9}


def test_a_time_limit_that_the_graph_does_not_name_is_that_of_the_hop() -> None:
    """An episode is given 300 seconds."""
    environment = "{use: hops.environments.calculator, calls: 3, history: notes, max_tokens: 14}"
    done = flowgraph.simulate(
        "graphs/multiturn.yaml", steps=6, warmup=0, lengths="exponential:10", speed={**SPEED, "step": 10.0},
        overrides=[f"hops.rollout.with={{environment: {environment}}}"],
    )  # fmt: skip
    assert done.ledger.dropped["time limit"] > 0
    assert max(point.seconds for point in done.points) > 250
    assert done.flight_seconds < 300


@pytest.mark.parametrize("limits", [(None, None), (0.55, None), (None, 0.55), (0.45, 0.55)])
@pytest.mark.parametrize("failures", [0.0, 0.1])
def test_of_two_requests_for_one_trajectory_each_ends_for_itself(
    limits: tuple[float | None, float | None], failures: float
) -> None:
    first, second = limits
    over = [SECOND + (f", with: {{time_limit: {second}}}}}" if second else "}")]
    over += ["dims.sample=4", *([f"hops.rollout.with.time_limit={first}"] if first else [])]
    done = flowgraph.simulate(
        GRAPH, steps=5, warmup=0, overrides=over, lengths="lognormal:3,0.6", failures=failures, slots=200,
        speed=SPEED,
    )  # fmt: skip
    assert done.ledger.consumed >= done.trajectories == 5 * 32
    assert bool(done.ledger.dropped.get("time limit")) == any(limits)
    assert bool(done.ledger.dropped.get("failed")) == bool(failures)
    assert done.in_flight * done.seconds == pytest.approx(done.residence, rel=1e-9)


class _Listened(Ring):
    """A ring that keeps what is published of an engine's backlog."""

    def open(self, resources: Any) -> None:
        self.heard: list[int] = []
        super().open(resources)

    def publish(self, hop: str, output: str, value: Any) -> None:
        if output == "backlog":
            self.heard.append(value)
        super().publish(hop, output, value)


def test_a_request_that_fails_tells_nothing_of_the_engine() -> None:
    plan = flowgraph.compile(GRAPH, ["hops.dispatch.in.backlog={from: rollout, delay: 1}"])
    settings = {"failures": 0.1, "slots": 32, "lengths": "uniform:1,8"}
    ring = _Listened(endless(plan), fit(make(settings), plan))
    ring.run(4, 0)
    counts = ring.ledger.counts
    failed = counts.dropped["failed"]
    ended = counts.dispatched - len(list(ring.fleet.requests()))
    assert failed > 0
    assert len(ring.heard) < ended
    # Of those that failed, the last few may not have been dropped yet.
    assert ended - len(ring.heard) - failed <= counts.ready
    assert max(ring.heard) > 0
    ring.close()
