"""The watermark follows what is seen, within its bounds, and does not swing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hops.pace import Pace, observe

Seen = dict[str, bool]
NOTHING: Seen = {"bound": True, "starved": False, "pressed": False, "idle": False}


def turnovers(
    pace: Pace, n: int, see: Callable[[Pace], Seen], least: int = 4, most: int = 1000
) -> list[float]:
    """The watermark after each of n turnovers."""
    after = []
    for _ in range(n):
        left = pace.finished + 1
        while left:
            observe(pace, **{**NOTHING, **see(pace)}, least=least, most=most)
            left = pace.finished
        after.append(pace.watermark)
    return after


def test_it_grows_while_training_starves_and_no_further_than_the_lag_admits() -> None:
    after = turnovers(Pace(16.0), 30, lambda pace: {"starved": True}, most=200)
    assert after[:3] == [20.0, 25.0, 32.0]
    assert after[-1] == 200.0


def test_it_does_not_grow_where_it_is_not_what_bounds_the_flow() -> None:
    assert set(turnovers(Pace(16.0), 5, lambda pace: {"starved": True, "bound": False})) == {16.0}


def test_it_shrinks_while_a_batch_too_many_waits_and_training_is_fed() -> None:
    after = turnovers(Pace(100.0), 60, lambda pace: {"idle": True}, least=10)
    assert after[0] == 95.0
    assert after[-1] == 10.0


def test_it_shrinks_when_something_was_dropped_as_stale() -> None:
    pace = Pace(100.0)
    pace.dropped = 1
    assert turnovers(pace, 2, lambda pace: {}) == [80.0, 80.0]


def test_after_it_shrank_it_waits_two_turnovers() -> None:
    pace = Pace(100.0)
    pace.dropped = 1
    assert turnovers(pace, 1, lambda pace: {}) == [80.0]
    assert turnovers(pace, 3, lambda pace: {"starved": True}) == [80.0, 80.0, 100.0]


def test_stragglers_that_are_dropped_do_not_starve_training() -> None:
    """Else a heavy tail, of which some is always dropped, would shrink it to nothing."""
    pace = Pace(100.0)
    for _ in range(4):
        pace.dropped = 20
        turnovers(pace, 1, lambda pace: {"starved": True})
    assert pace.watermark > 100.0
    pace.dropped = 200
    before = pace.watermark
    assert turnovers(pace, 1, lambda pace: {"starved": True}) == [before], "most was dropped: more is no help"


@pytest.mark.parametrize("room", [20, 50, 333])
def test_under_an_engine_that_has_room_for_so_many_it_settles_below_that(room: int) -> None:
    """Case S13: no oscillation. Training starves always, so that all the pressure is upwards."""
    pace = Pace(float(room // 4))
    pressed: list[bool] = []

    def see(pace: Pace) -> Seen:
        return {"starved": True, "pressed": pace.watermark > room}

    for _ in range(200):
        pressed.append(pace.watermark > room)
        turnovers(pace, 1, see)
    after = turnovers(pace, 100, see)
    assert sum(pressed) <= 200 / 12, "it tries again now and then"
    assert min(after) >= 0.7 * room
    assert max(after) <= 1.05 * room + 1


@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans()), max_size=300
    ),
    st.integers(1, 20),
    st.integers(0, 50),
)
def test_whatever_is_seen_it_stays_within_its_bounds(
    seen: list[tuple[bool, bool, bool, bool, bool]], least: int, more: int
) -> None:
    most = least + more
    pace = Pace(float(least))
    before = pace.watermark
    for bound, starved, pressed, idle, dropped in seen:
        pace.dropped += dropped
        observe(pace, bound=bound, starved=starved, pressed=pressed, idle=idle, least=least, most=most)
        assert least <= pace.watermark <= most
        assert 0.8 * before - 1 <= pace.watermark <= 1.25 * before + 1
        assert pace.finished < pace.watermark
        before = pace.watermark
