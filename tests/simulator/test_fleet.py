"""The engines of the simulator against one that is stepped token by token, and against what they promise."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph.simulator.engines import SLACK, Fleet, Request, Speed
from tests.simulator.token_by_token import Asked, step_through

ASKED = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=14
).map(lambda found: [Asked(uid, uid + 1, tokens) for uid, _, tokens in found])
SPEED = st.builds(
    Speed,
    step=st.sampled_from([0.5, 1.0]),
    per_request=st.sampled_from([0.0, 0.25]),
    per_token=st.sampled_from([0.0, 0.125]),
    prefill=st.sampled_from([4.0, 1e9]),
)


def _drain(fleet: Fleet) -> dict[int, float]:
    ends = {}
    while (now := fleet.next()) < math.inf:
        request = fleet.pop()
        if request is not None:
            ends[request.key] = now
    return ends


@settings(max_examples=300, deadline=None)
@given(ASKED, st.integers(1, 6), SPEED, st.sampled_from([math.inf, 40.0, 60.0, 100.0]))
def test_requests_end_when_they_do_token_by_token(
    asked: list[Asked], slots: int, speed: Speed, kv: float
) -> None:
    fleet = Fleet(1, slots, speed, kv)
    for i, one in enumerate(asked):
        fleet.submit(Request(i, *one), 0.0)
    ends = _drain(fleet)
    stepped, retractions = step_through(asked, slots, speed, kv)
    assert ends == pytest.approx(stepped, rel=1e-9)
    assert fleet.retractions == retractions
    assert (fleet.running, fleet.waiting, fleet.serving) == (0, 0, 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=40),
    SPEED,
    st.sampled_from([math.inf, 60.0]),
)
def test_each_of_many_engines_is_as_it_is_alone_and_what_happens_is_in_order(
    asked: list[tuple[int, int, int]], speed: Speed, kv: float
) -> None:
    def run(fleet: Fleet, asked: list[tuple[float, Request]]) -> dict[int, float]:
        """Ends of requests that come at these times."""
        ends, last = {}, 0.0
        for at, request in [*asked, (math.inf, None)]:
            while (now := fleet.next()) < math.inf and now <= at:
                assert now >= last
                last, over = now, fleet.pop()
                if over is not None:
                    ends[over.key] = now
            if request is not None:
                fleet.submit(request, at)
        assert fleet.next() == math.inf
        return ends

    def requests() -> list[tuple[float, Request]]:
        times = accumulate(wait for _, _, wait in asked)
        return [
            (float(at), Request(i, uid, 1 + uid % 3, tokens))
            for i, (at, (uid, tokens, _)) in enumerate(zip(times, asked, strict=True))
        ]

    together = requests()
    ends = run(Fleet(3, 4, speed, kv), together)
    home = {request.key: request.engine.index for _, request in together}
    alone: dict[int, float] = {}
    for engine in range(3):
        alone |= run(Fleet(1, 4, speed, kv), [one for one in requests() if home[one[1].key] == engine])
    assert ends == alone


def test_n_requests_share_an_engine_and_one_that_comes_later_slows_them_down() -> None:
    fleet = Fleet(1, 8, Speed(step=1.0, per_request=1.0, prefill=math.inf))
    fleet.submit(Request(0, 0, 1, 10), 0.0)
    fleet.submit(Request(1, 1, 1, 4), 10.0)  # 5 tokens of the first are done: alone, one takes 2 s
    assert fleet.next() == 10 + 4 * 3
    assert fleet.pop().key == 1  # type: ignore[union-attr]
    assert fleet.next() == 22 + 1 * 2


def test_weights_that_come_stop_all_engines_and_have_their_kv_computed_again() -> None:
    fleet = Fleet(2, 1, Speed(step=1.0, per_request=0.0, prefill=2.0))
    for key in range(2):
        fleet.submit(Request(key, key, 4, 10), 0.0)
    fleet.pause(7.0, 3.0, again=True)  # 2 s of prefill, then 5 tokens
    assert fleet.next() == 7 + 3 + (4 + 5) / 2 + 5
    fleet.pause(7.0, 1.0, again=False)
    assert fleet.next() == 7 + 3 + (4 + 5) / 2 + 1 + 5


def test_a_group_goes_where_its_prompt_is_until_that_engine_is_busier_by_more_than_the_slack() -> None:
    fleet = Fleet(3, 64, Speed())
    for key in range(SLACK + 2):
        fleet.submit(Request(key, 0, 100, 5), 0.0)
    assert sorted(fleet.load) == [0, 1, SLACK + 1]
    assert fleet.prefilled == 200  # its prompt, once an engine


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=60), st.integers(1, 5))
def test_a_request_goes_to_an_engine_that_has_the_fewest_or_to_its_groups(
    asked: list[tuple[int, int]], engines: int
) -> None:
    fleet = Fleet(engines, 2, Speed(step=1.0, per_request=0.0))
    loads = Counter({engine.index: 0 for engine in fleet.all})
    for key, (uid, tokens) in enumerate(asked):
        while fleet.next() <= 3 * key:
            over = fleet.pop()
            assert over is not None, "there is memory for all"
            loads[over.engine.index] -= 1
        request, least = Request(key, uid, 3, tokens), min(loads.values())
        fleet.submit(request, 3.0 * key)
        assert least <= loads[request.engine.index] <= least + SLACK
        loads[request.engine.index] += 1
        assert loads == dict(enumerate(fleet.load))
