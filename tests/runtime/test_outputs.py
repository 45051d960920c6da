"""flowgraph.outputs: a hop writes where others read, and whatever it does with that memory, they read what it gave."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowgraph
from flowgraph import outputs
from flowgraph.errors import PayloadError
from flowgraph.plan.plan import Hop
from flowgraph.runtime import writing
from flowgraph.runtime.arena import Arena, areas
from flowgraph.runtime.copying import address
from flowgraph.runtime.desk import Desk
from flowgraph.runtime.inplace import Offer
from flowgraph.runtime.pages import Pages
from tests.runtime import toy
from tests.runtime.harness import TOY, run_toy, steps
from tests.runtime.placing import WAYS

PLACED = "hops.rollout.use=tests.runtime.placing.sample"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return steps(run_toy(tmp_path_factory.mktemp("toy")).directory)


@pytest.mark.parametrize("how", WAYS)
def test_readers_get_what_the_hop_gave(tmp_path: Path, how: str, expected: list[dict[str, Any]]) -> None:
    """Blocks are counted too, so one that is lost or given back twice would end the run."""
    found = steps(run_toy(tmp_path, PLACED, f"hops.rollout.with.how={how}").directory)
    assert found == expected


def test_so_they_do_in_verify_mode_and_between_processes(
    tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    assert steps(run_toy(tmp_path / "verified", PLACED, verify=True).directory) == expected
    assert steps(run_toy(tmp_path / "processes", PLACED, executor="processes").directory) == expected


class Bench:
    """The toy's rollout, whose firings end here."""

    def __init__(self) -> None:
        self.plan = flowgraph.compile(TOY)
        self.hop: Hop = self.plan.hops["rollout"]
        self.arena = Arena(Pages(-1, self.plan.owners["rollout"].arena_bytes))
        self.desk = Desk(self.arena, areas(self.plan)["rollout"])

    @property
    def live(self) -> int:
        self.desk.free({})  # what was let go of
        return len(self.desk.regions["rollout"].live)

    def holds(self, array: Any) -> bool:
        start = address(np.frombuffer(self.arena.view, np.uint8))
        return start <= address(array) < start + len(self.arena.view)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def filled(out: dict[str, Any]) -> dict[str, Any]:
    out["tokens"][:] = [5, 6, 7]
    out["response_mask"][:] = [False, True, True]
    out["leaf_offsets"][:] = [0, 3]
    out["unread"][:] = 0
    return {**out, "metrics": {}}


def test_arrays_that_cross_as_they_are_lie_in_the_block_and_nothing_is_copied(bench: Bench) -> None:
    with Offer(bench.desk, bench.hop, toy.sample) as offer:
        given = filled(outputs(toy.sample, token=3, leaf=1))
        assert bench.holds(given["tokens"])
        assert bench.holds(given["leaf_offsets"])
        assert not bench.holds(given["response_mask"])  # it becomes bits
        assert not bench.holds(given["unread"])  # nobody reads it
        before = {name: address(given[name]) for name in ("tokens", "leaf_offsets")}
        checked = offer.accept(writing.checked(bench.hop, bench.hop.checked, given))
        stored = bench.desk.store(bench.hop, given, checked, at=offer.offset)
    assert stored.offset == offer.offset
    assert bench.live == 1
    plain = bench.desk.store(bench.hop, given, writing.checked(bench.hop, bench.hop.checked, given))
    assert (plain.sizes, plain.wrote, plain.nbytes) == (stored.sizes, stored.wrote, stored.nbytes)
    view, n = bench.arena.view, stored.nbytes
    assert view[stored.offset : stored.offset + n] == view[plain.offset : plain.offset + n]
    assert {name: address(given[name]) for name in before} == before


def test_a_block_is_free_again_when_the_hop_fails(bench: Bench) -> None:
    def fails() -> None:
        with Offer(bench.desk, bench.hop, toy.sample):
            outputs(toy.sample, token=3, leaf=1)
            assert bench.live == 1
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert bench.live == 0
    assert not bench.holds(outputs(toy.sample, token=3, leaf=1)["tokens"])


def test_what_is_larger_than_its_bound_gets_no_place_and_is_refused_by_name_as_ever(bench: Bench) -> None:
    bound = dict(zip(bench.hop.dims, bench.hop.bounds, strict=True))["token"]
    with Offer(bench.desk, bench.hop, toy.sample) as offer:
        out = outputs(toy.sample, token=bound + 1, leaf=1)
        assert offer.offset == -1
    out["leaf_offsets"][:] = [0, bound + 1]
    given = {**out, "metrics": {}}
    with pytest.raises(flowgraph.RunError, match=f"token={bound + 1}, and the graph's bound is {bound}"):
        bench.desk.store(bench.hop, given, writing.checked(bench.hop, bench.hop.checked, given))


def test_the_outputs_of_another_hop_have_no_place_here(bench: Bench) -> None:
    with Offer(bench.desk, bench.hop, toy.sample):
        out = outputs(toy.reward, leaf=2)
        assert bench.live == 0
    assert {name: (array.dtype, array.shape) for name, array in out.items()} == {
        "score": (np.float32, (2,)),
        "scored": (np.bool_, (2,)),
    }


def test_a_size_that_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(
        ValueError, match="outputs of sample lack the size of leaf; give each of: leaf, token"
    ):
        outputs(toy.sample, token=3)
    with pytest.raises(ValueError, match="outputs of sample have no dim rows; give each of: leaf, token"):
        outputs(toy.sample, token=3, leaf=1, rows=2)


def test_a_block_of_a_hop_that_failed_is_not_given_again_while_a_thread_may_write_there(bench: Bench) -> None:
    left_behind: list[Any] = []

    def fails() -> None:
        with Offer(bench.desk, bench.hop, toy.sample):
            left_behind.append(outputs(toy.sample, token=3, leaf=1)["tokens"][1:])
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert bench.live == 1
    others = [bench.desk.take("rollout", 64) for _ in range(bench.desk.regions["rollout"].count - 1)]
    with pytest.raises(
        PayloadError, match="hop rollout: firings that failed or were interrupted hold 1 blocks"
    ):
        bench.desk.take("rollout", 64)
    thread = threading.Thread(target=left_behind.clear)  # where it is let go does not matter
    thread.start()
    thread.join()
    assert bench.desk.take("rollout", 64) not in others


def test_another_thread_gets_ordinary_arrays(bench: Bench) -> None:
    with Offer(bench.desk, bench.hop, toy.sample), ThreadPoolExecutor(1) as threads:
        run = contextvars.copy_context().run
        given = threads.submit(run, lambda: outputs(toy.sample, token=3, leaf=1)).result()
        assert not bench.holds(given["tokens"])
        assert bench.live == 0


def test_what_an_earlier_firing_was_given_is_refused_and_not_read_as_it_is_now(bench: Bench) -> None:
    with Offer(bench.desk, bench.hop, toy.sample) as offer:
        kept = filled(outputs(toy.sample, token=3, leaf=1))
        offer.accept(writing.checked(bench.hop, bench.hop.checked, kept))
    for ask in (False, True):
        given = filled(outputs(toy.sample, token=3, leaf=1))
        with Offer(bench.desk, bench.hop, toy.sample) as offer:
            if ask:
                given = filled(outputs(toy.sample, token=3, leaf=1))
            given["tokens"] = kept["tokens"]
            with pytest.raises(
                PayloadError, match="tokens lies in memory of `outputs` that an earlier firing"
            ):
                offer.accept(writing.checked(bench.hop, bench.hop.checked, given))


@pytest.mark.parametrize("size", [-1, 3.7, "3", None, np.float64(2)])
def test_sizes_are_whole_numbers_from_0_on(bench: Bench, size: Any) -> None:
    with Offer(bench.desk, bench.hop, toy.sample):
        with pytest.raises(
            ValueError, match=r"outputs of sample: token is .*; give a whole number from 0 on"
        ):
            outputs(toy.sample, token=size, leaf=1)
        assert bench.live == 0
    with pytest.raises(TypeError, match="the hop itself first, a function, not None"):
        outputs(None, token=1, leaf=1)  # type: ignore[arg-type]
