"""What blocks take in a running ring: as much as they have bytes, for as long as somebody may read them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph.errors import LedgerError, MemoryShort, PayloadError, RunError, WorkerDied
from flowgraph.limits import available
from flowgraph.passes.pipeline import load
from flowgraph.plan.compile import compile_file, compile_graph
from flowgraph.runtime import writing
from flowgraph.runtime.arena import areas
from flowgraph.runtime.desk import Desk, at_most, block_bytes
from flowgraph.runtime.executors import InProcess
from flowgraph.runtime.ring import Ring
from flowgraph.runtime.transport import arenas
from tests.runtime.generated import Observed
from tests.runtime.harness import TOY, metrics, run_toy, summary

USERS = "tests.runtime.users"


class Watched(Ring):
    """fell: by how many bytes what is live in the rollout owner's arena fell with each drop"""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fell: list[int] = []

    def _drop(self, output: tuple[str, str], item: Any) -> None:
        gauge = self.table.gauges["rollout"]
        before = gauge.live
        super()._drop(output, item)
        self.fell.append(before - gauge.live)


def watched(*overrides: str, off: Collection[str] = ()) -> tuple[Watched, RunError | None]:
    """Run the toy ring in this process. What the driver says is alive afterwards is what its workers have placed."""
    loaded = load(TOY, overrides)
    assert loaded.graph is not None, loaded.diagnostics
    plan = compile_graph(loaded.graph, off=off)
    executor, problem = InProcess(), None
    with arenas(plan, alone=True) as memory:
        ring = Watched(plan, executor, {}, memory, Observed())
        try:
            executor.start(plan, {}, memory)
            ring.start()
            ring.run()
        except RunError as error:
            problem = error
        desks = {"driver": ring.local.desk} | {name: one.desk for name, one in executor.workers.items()}
        executor.stop(0)
    under_way = {(name, lease) for f in ring.in_flight.values() for name, lease in f.leases.items()}
    for owner, desk in desks.items():
        desk.free(ring.table.told(owner))
        for hop, region in ring.table.places[owner]:
            kept = {held.offset for held in region.leases.values()} - {-1}
            placed = desk.regions[hop].live.keys()
            assert kept <= placed, (owner, hop)
            assert under_way or kept == placed, (owner, hop)
    return ring, problem


def test_a_dropped_trajectory_frees_its_storage_at_once() -> None:
    """Case X6: a trajectory is filtered out. A thousand of them go through room for four."""
    few = ("dims.group=1", "dims.sample=1", "hops.rollout.with.jitter=0")
    ring, problem = watched(f"hops.batch.use={USERS}.drops_all", *few)
    assert "1001 trajectories were dropped" in str(problem)
    assert len(ring.fell) == 1000, "the last ends the run"
    assert min(ring.fell) > 0, "its tokens, mask and versions, as many bytes as they were"
    assert ring.table.homes["rollout"].capacity == 4
    assert ring.table.gauges["rollout"].most <= ring.plan.hops["rollout"].block_bytes


def test_the_reader_of_a_dead_owner_is_told_which(tmp_path: Path) -> None:
    """Case X6: an owner dies while others read what it wrote."""
    with pytest.raises(WorkerDied, match=r"owner rollout .* ended with exit code 7"):
        run_toy(tmp_path, "hops.rollout.with.die_at=8", executor="processes")
    region = watched("run.steps=1")[0].table.homes["rollout"]
    with pytest.raises(LedgerError, match="who reads a block of rollout names lease 1, and that is over"):
        region.at(1)


@pytest.mark.parametrize("off", [(), ("defer",), ("fuse",)])
def test_driver_and_workers_agree_on_what_is_alive(off: tuple[str, ...]) -> None:
    """Also where blocks pass through the driver's memory, and so begin in one arena and end in another."""
    ring, problem = watched("hops.dispatch.in.version.max_lag=1", "run.steps=8", off=off)
    assert problem is None
    home = "driver" if off == ("defer",) else "rollout"
    assert ring.table.gauges[home].most >= 6 * 40, "a batch of trajectories"


def test_a_group_that_gives_up_in_its_middle_leaves_no_block() -> None:
    """The first of two hops that fire as one has written its part when the second rejects the trajectory."""
    ring, problem = watched(
        "hops.reward.in={tokens: rollout, leaf_offsets: rollout, ground_truth: rollout}",
        f"hops.judge={{use: {USERS}.rejects_some, in: {{score: reward}}}}",
        "hops.buffer.in.trajectory=judge",
        "hops.dispatch.in.finished=judge",
        "run.steps=12",
    )
    assert problem is None
    assert ring.plan.hops["judge"].group == ("reward", "judge")
    assert ring.ledger.counts.dropped["odd"] > ring.table.desks["reward"].capacity, (
        "they would not have fitted"
    )


@pytest.mark.parametrize("executor", ["inproc", "processes"])
def test_a_run_says_how_its_arenas_are_used(tmp_path: Path, executor: Any) -> None:
    done = run_toy(tmp_path, executor=executor)
    plan = compile_file(TOY)
    for line in (one["arenas"] for one in metrics(done.directory) if "lags" in one):
        for owner, used in line.items():
            assert 0 <= used["live"] <= used["high_water"] <= plan.owners[owner].arena_bytes
            assert 0 <= used["fragmentation"] < 1
    whole = summary(done.directory)["arenas"]
    assert whole.keys() == {"driver", "rollout", "trainer"}
    for owner, used in whole.items():
        assert used["size"] == plan.owners[owner].arena_bytes
        assert used["live"] <= used["most"] <= used["high_water"] <= used["size"]
    assert whole["rollout"]["most"] > 0


# --- before a run ----------------------------------------------------------------------------------------------------


def limited(folder: Path, limit: int) -> Path:
    """A control group's files, of one that uses nothing yet."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("0\n")
    (folder / "memory.stat").write_text("anon 0\ninactive_file 0\n")
    (folder / "own").write_text("0::/\n")
    return folder


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_arenas_beyond_the_limit_of_the_control_group_are_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Case X8: an arena larger than the memory limit."""
    plan = compile_file(TOY)
    needed = sum(owner.arena_bytes for owner in plan.owners.values())
    group = limited(tmp_path, int(share * needed))
    monkeypatch.setattr(
        "flowgraph.runtime.transport.available", functools.partial(available, group, group / "own")
    )
    with (
        pytest.raises(MemoryShort, match=r"error\[FG908\] the arenas take \S+ KB, and \S+ KB of memory are"),
        arenas(plan),
    ):
        pass
    limited(tmp_path, needed)
    with arenas(plan) as memory:
        assert memory.open("driver", plan.owners).keys() == plan.owners.keys()


def test_engines_and_learners_count_beside_the_arenas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case X8: each would fit alone."""
    plan = compile_file("graphs/quickstart.yaml")
    group = limited(tmp_path, 2_000_000_000)
    monkeypatch.setattr(
        "flowgraph.runtime.transport.available", functools.partial(available, group, group / "own")
    )
    said = r"the arenas take \S+ MB and the engines and learners \S+ GB, and 2.00 GB of memory are available"
    with pytest.raises(MemoryShort, match=said), arenas(plan):
        pass


def test_weights_that_go_through_dev_shm_have_to_fit_there_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case X8: weights larger than /dev/shm. Those of `weights: disk` are in memory without a name."""
    graph = Path("graphs/quickstart_sglang.yaml").read_text()
    given = "use: sglang, "  # of the options that stand there
    assert given in graph
    monkeypatch.setattr("flowgraph.runtime.transport.SHM", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000_000))
    for weights, refused in (("tensor", True), ("disk", False)):
        (tmp_path / "graph.yaml").write_text(graph.replace(given, f"{given}weights: {weights}, "))
        with contextlib.ExitStack() as inside:
            if refused:
                said = r"weights go through files of \d+ MB in \S+, and 100 MB are free there"
                inside.enter_context(pytest.raises(MemoryShort, match=said))
            inside.enter_context(arenas(compile_file(str(tmp_path / "graph.yaml"))))


# --- the bound of a block ---------------------------------------------------------------------------------------------


def values(lengths: list[int], prompt: int) -> dict[str, Any]:
    """What a rollout of so many tokens gives, with leaves that have the prompt in common."""
    tokens = [np.arange(prompt + n, dtype=np.int32) for n in lengths]
    ends = np.cumsum([0, *map(len, tokens)]).astype(np.int64)
    whole = np.concatenate(tokens)
    return {
        "tokens": whole,
        "response_mask": whole >= prompt,
        "leaf_offsets": ends,
        "unread": np.zeros(len(whole), np.float32),
    }


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 4000), min_size=1, max_size=2), prompt=st.integers(0, 4))
def test_a_block_takes_no_more_room_than_its_values_have_bytes(lengths: list[int], prompt: int) -> None:
    """What is taken before they are written is all that is needed, but for forms whose size shows only then."""
    for passes in ((), ("encode",)):
        plan = compile_file(TOY, ["dims.response={mean: 2, max: 4000}"], off=passes)
        hop = plan.hops["rollout"]
        outputs = values(lengths, prompt)
        checked = writing.checked(hop, hop.checked, outputs)
        with arenas(plan, alone=True) as memory:
            desk = Desk(memory.open("rollout", ["rollout"])["rollout"], areas(plan)["rollout"])
            stored = desk.store(hop, outputs, checked)
        most = at_most(hop, checked)
        assert desk.regions["rollout"].levels
        assert stored.nbytes == block_bytes(hop, stored.sizes) <= most <= hop.block_bytes
        assert most - stored.nbytes <= 8 * len(hop.written) + 4 * sum(lengths) + 4 * prompt + 4


def test_what_is_refused_leaves_no_block() -> None:
    plan = compile_file(TOY)
    hop = plan.hops["rollout"]
    outputs = values([5, 7], 4)
    checked = writing.checked(hop, hop.checked, outputs)
    with arenas(plan, alone=True) as memory:
        desk = Desk(memory.open("rollout", ["rollout"])["rollout"], areas(plan)["rollout"])
        with pytest.raises(PayloadError, match="the graph's bound is 16"):
            desk.store(hop, outputs, checked)
        assert not desk.regions["rollout"].live
