"""Thousands of trajectories through one arena while its writer and its readers are killed: nothing is lost or leaks."""

from __future__ import annotations

import os
import random

import pytest

from tests.runtime.soak import AREA, Soak, anonymous

MIB = 1 << 20


@pytest.mark.parametrize(
    ("trajectories", "kills"), [(1000, 4), pytest.param(20_000, 150, marks=pytest.mark.slow)]
)
def test_no_block_is_lost_leaks_or_is_written_over_while_processes_are_killed(
    trajectories: int, kills: int
) -> None:
    seed = random.randrange(1 << 30)
    print(f"Soak({trajectories}, {kills}, seed={seed})")  # shown when it fails
    soak = Soak(trajectories, kills, seed)
    before = anonymous(os.getpid())
    soak.run()
    assert soak.done == trajectories, "every one was read, and had the checksum of what was written"
    assert len(soak.killed) == kills
    gauge = soak.region.gauge
    assert (gauge.live, gauge.used, soak.region.live, soak.placed) == (0, 0, 0, 0)
    assert gauge.most <= gauge.high_water <= AREA.size * AREA.frames
    contents = 2 * AREA.size  # that are drawn and let go of
    assert soak.growth < contents + 4 * MIB, "no process grew"
    assert anonymous(os.getpid()) - before < contents + 4 * MIB
    # What is bounded loosely may take pages to the end of its frame.
    assert soak.arena[-1] <= gauge.high_water + AREA.size
