"""Lengths: what the numbers of a distribution mean, and that the i-th value depends on the seed and i alone."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.simulator.lengths import Drawn, Lengths, parse_share

N = 40_000


def _values(text: str, most: int = 10**9, seed: int = 1) -> list[int]:
    lengths = Lengths(text, most=most, seed=seed, stream=1)
    return [lengths.at(i) for i in range(N)]


# name → mean and standard deviation of a length
MOMENTS = {
    "fixed:17": (17.0, 0.0),
    "exponential:2000": (2000.0, 2000.0),
    "uniform:500,1500": (1000.0, 1000 / math.sqrt(12)),
    "lognormal:2000,0.8": (2000.0, 2000 * math.sqrt(math.exp(0.8**2) - 1)),
    "pareto:1000,4": (1000.0, 1000 / math.sqrt(8)),
}


@pytest.mark.parametrize("text", MOMENTS)
def test_the_mean_is_that_of_the_length_itself(text: str) -> None:
    mean, deviation = MOMENTS[text]
    found = _values(text)
    assert fmean(found) == pytest.approx(mean, abs=4 * deviation / math.sqrt(N) + 0.01)
    assert stdev(found) == pytest.approx(deviation, rel=0.1, abs=0.01)


def test_sigma_is_the_deviation_of_the_logarithm() -> None:
    logs = [math.log(value) for value in _values("lognormal:200000,1.2")]
    assert stdev(logs) == pytest.approx(1.2, rel=0.02)


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=30), st.integers(0, 3))
def test_the_ith_length_depends_on_the_seed_and_on_i_alone(order: list[int], seed: int) -> None:
    there = Lengths("lognormal:2000,1.2", most=8192, seed=seed, stream=1)
    back = Lengths("lognormal:2000,1.2", most=8192, seed=seed, stream=1)
    forward = {i: there.at(i) for i in order}
    assert forward == {i: back.at(i) for i in reversed(order)}
    assert all(1 <= value <= 8192 for value in forward.values())


def test_a_trace_is_read_in_order_and_again(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n700\n31\n")
    lengths = Lengths(f"trace:{file}", most=512, seed=0, stream=1)
    assert [lengths.at(i) for i in range(5)] == [12, 512, 31, 12, 512]
    assert lengths.at(4096 * 3 + 1) == lengths.at(1)
    for text, said in (
        ("12\n\nmany\n", ":3: 'many' is no length; write one number above 0 a line"),
        ("12\n1 2 3\n", ":2: '1 2 3' is no length"),
        ("-1\n", ":1: '-1' is no length"),
        ("\n", "is empty; give a file with one length a line"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            Lengths(f"trace:{file}", most=512, seed=0, stream=1)


def test_a_share_is_from_0_to_1() -> None:
    for text in ("beta:0.5,2", "uniform:0,1", "fixed:0", "fixed:1"):
        drawn = Drawn(parse_share(text), 0, 4)
        assert all(0 <= drawn.at(i) <= 1 for i in range(100))
    with pytest.raises(ValueError, match="no share of tries"):
        parse_share("fixed:-1")


def test_what_is_cut_is_counted_among_those_that_were_asked_for() -> None:
    lengths = Lengths("uniform:1,100", most=50, seed=3, stream=1)
    free = Lengths("uniform:1,100", most=1000, seed=3, stream=1)
    for n in (1, 7, 5000):
        assert lengths.cut(n) == pytest.approx(sum(free.at(i) > 50 for i in range(n)) / n)
    assert free.cut(5000) == lengths.cut(0) == 0
