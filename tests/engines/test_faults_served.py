"""The fault matrix, on the transformers engine in server processes: the process killed, or the connection cut, before,
inside and after each action of a sync, with requests under way.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import KINDS, PATHS, PROBE, SLOTS, Faulty, interrupted
from proxy import Moment
from served_model import CONTEXT, ServedModel

from flowgraph.engines.protocol import EngineLoad, PauseMode
from flowgraph.engines.registry import TransformersOptions
from flowgraph.engines.transformers import TransformersEngine
from flowgraph.errors import EngineFailed

Reference = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def reference(served_model: ServedModel) -> Reference:
    """By an engine in this process."""
    engine = TransformersEngine(
        str(served_model.directory), slots=SLOTS, context=CONTEXT, dtype="float32", threads=1
    )
    out = {}
    for kind in KINDS:
        engine.pause("abort")
        engine.update_weights(served_model.weights(kind), 0)
        engine.proceed()
        out[kind] = engine.logprobs(PROBE)
    engine.close()
    return out


def faulty(model: ServedModel, logs: Path, reference: Reference, processes: int) -> Faulty:
    options = TransformersOptions(str(model.directory), slots=SLOTS, dtype="float32", processes=processes)
    return Faulty(options, model, logs, reference)


@pytest.fixture(scope="module")
def one(
    served_model: ServedModel, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    one = faulty(served_model, tmp_path_factory.mktemp("one"), reference, 1)
    yield one
    one.close()
    one.nothing_is_left()


@pytest.fixture
def two(served_model: ServedModel, reference: Reference, tmp_path: Path) -> Iterator[Faulty]:
    two = faulty(served_model, tmp_path, reference, 2)
    yield two
    two.close()
    two.nothing_is_left()


MATRIX: list[tuple[str, Moment]] = [
    *((action, moment) for action in PATHS for moment in ("before", "after")),  # type: ignore[misc]
    ("update", "inside"),
]
SELECTION: list[tuple[str, Moment, PauseMode]] = [
    (action, moment, pause)
    for pause in ("abort", "in_place")
    for action, moment in (
        ("pause", "before"),
        ("pause", "after"),
        ("update", "after"),
        ("continue", "after"),
    )
]  # type: ignore[misc]


@pytest.mark.parametrize(("action", "moment"), MATRIX)
def test_the_connection_is_cut(one: Faulty, action: str, moment: Moment) -> None:
    one.play("cut", action, moment, "retract")


@pytest.mark.parametrize(("action", "moment", "pause"), SELECTION)
def test_the_connection_is_cut_in_the_other_modes_of_pausing(
    one: Faulty, action: str, moment: Moment, pause: PauseMode
) -> None:
    one.play("cut", action, moment, pause)


# A new server takes seconds: those that die after an action take their turn with what takes minutes.
KILLS = [pytest.param(*at, marks=[pytest.mark.slow] * (at[1] == "after")) for at in MATRIX]


@pytest.mark.parametrize(("action", "moment"), KILLS)
def test_the_server_is_killed(one: Faulty, action: str, moment: Moment) -> None:
    one.play("killed", action, moment, "retract")


@pytest.mark.parametrize("pause", ["abort", "in_place"])
def test_the_server_is_killed_in_the_middle_of_an_update_in_the_other_modes(
    one: Faulty, pause: PauseMode
) -> None:
    one.play("killed", "update", "inside", pause)


def test_the_server_is_killed_between_syncs(one: Faulty) -> None:
    """Nobody syncs: the request that finds out waits until the server is back, with the newest weights."""

    async def case() -> None:
        tasks = one.ask_many()
        await one.running.until(lambda load: load.running >= SLOTS)
        one.kill()
        outs = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
        one.check_requests(list(outs), "retract", {one.engine.version})
        await one.check_served()

    one.do(case())


def test_the_server_is_unreachable_for_a_while(one: Faulty) -> None:
    async def case() -> None:
        (proxy,) = one.proxies
        old = one.engine.version
        pid = one.running.processes()

        def refuse() -> None:
            async def for_a_while() -> None:
                await proxy.refuse()
                await asyncio.sleep(1.5)
                await proxy.listen()

            refused.append(asyncio.ensure_future(for_a_while()))

        refused: list[asyncio.Task[None]] = []
        proxy.trap(PATHS["update"], "inside", refuse)
        synced, outs = await one.sync_with_requests_under_way("retract")
        await refused[0]
        assert synced.seconds > 1.5
        assert one.running.processes() == pid
        one.check_requests(outs, "retract", {old, old + 1})
        await one.check_served()

    one.do(case())


def test_a_request_whose_answer_is_lost_is_returned_once(one: Faulty) -> None:
    async def case() -> None:
        (proxy,) = one.proxies
        proxy.trap("/generate", "after")
        (task,) = one.ask_many(1)
        one.check_requests([await asyncio.wait_for(task, 60.0)], "retract", {one.engine.version})
        await one.until_all_serve()
        await one.check_served()

    one.do(case())


def test_a_server_that_stops_answering_is_killed_and_replaced_within_the_deadline(one: Faulty) -> None:
    async def case() -> None:
        old, pid = one.engine.version, one.running.processes()
        (proxy,) = one.proxies
        proxy.trap(PATHS["pause"], "before", lambda: one.signal(signal.SIGSTOP), cut=False)
        tasks = one.ask_many()
        await one.running.until(lambda load: load.running >= SLOTS)
        one.journal.clear()
        synced = await one.sync(seconds=32.0)
        assert 8.0 < synced.seconds < 32.0
        assert one.running.processes() != pid
        outs = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
        one.check_requests(list(outs), "retract", {old, old + 1})
        assert one.story() == interrupted("pause")
        assert [e.said for e in one.journal if e.outcome == "failed" and e.attempt == 1] == [
            "it did not pause in 8.0 s"
        ]
        await one.check_served()

    one.do(case())


def test_weights_of_another_model_leave_the_old_ones_served(one: Faulty, served_model: ServedModel) -> None:
    async def case() -> None:
        weights = served_model.weights("base")
        name = next(iter(weights))
        before, asked = one.engine.version, one.ask_many()
        with pytest.raises(ValueError, match=f"no weight was changed.*{name!r} is missing"):
            await one.engine.sync({n: t for n, t in weights.items() if n != name}, before + 1)
        assert one.engine.version == before
        outs = await asyncio.wait_for(asyncio.gather(*asked), 60.0)
        one.check_requests(list(outs), "retract", {before})
        await one.check_served()

    one.do(case())


def test_of_two_servers_one_is_killed_in_a_sync_and_the_other_serves_at_once(two: Faulty) -> None:
    async def case() -> None:
        tasks = two.ask_many(8)
        await two.running.until(lambda load: load.running >= 2 * SLOTS)
        two.proxies[1].trap(PATHS["update"], "inside", lambda: two.kill(1))
        sync = asyncio.ensure_future(two.sync())
        async with asyncio.timeout(30.0):
            while not two.engine.members[0].sync.serves(1):
                await asyncio.sleep(0.01)
            out = await two.running.ask(PROBE, 4)
        assert set(out.versions.tolist()) == {1}
        assert not sync.done()
        assert not two.engine.members[1].sync.serves(1)
        synced = await sync
        assert (synced.replicas, synced.retries) == (2, 1)
        outs = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
        two.check_requests(list(outs), "retract", {0, 1})
        assert two.story(1) == interrupted("update")
        await two.check_served()
        # A late one: it stays out while the other serves, and comes back by itself.
        two.signal(signal.SIGSTOP, 1)
        synced = await two.sync(seconds=2.0)
        assert synced.replicas == 1
        await two.check_served()
        await two.until_all_serve()
        await two.check_served()

    two.do(case())


@pytest.mark.parametrize("fault", ["", "killed"])
def test_close_in_the_middle_of_a_sync_leaves_nothing(
    served_model: ServedModel, reference: Reference, tmp_path: Path, fault: str
) -> None:
    one = faulty(served_model, tmp_path, reference, 1)
    (pid,) = one.running.processes()
    reached = asyncio.Event()

    async def case() -> None:
        tasks = one.ask_many()
        await one.running.until(lambda load: load.running >= SLOTS)
        one.proxies[0].trap(
            PATHS["update"], "inside", lambda: (fault and one.kill(), reached.set()), cut=bool(fault)
        )
        sync = asyncio.ensure_future(one.engine.sync(served_model.weights("other"), 1))
        await reached.wait()
        if fault:  # until its successor is being started
            async with asyncio.timeout(30.0):
                while one.running.processes() in ([], [pid]):
                    await asyncio.sleep(0.01)
        last = one.running.processes()
        await one.engine.close()
        results = await asyncio.wait_for(asyncio.gather(sync, *tasks, return_exceptions=True), 10.0)
        assert isinstance(results[0], EngineFailed | RuntimeError)
        assert {getattr(out, "finish_reason", repr(out)) for out in results[1:]} == {"abort"}
        assert one.engine.load() == EngineLoad(0, 0, 0)
        for each in (pid, *last):
            with pytest.raises(ProcessLookupError):
                os.kill(each, 0)

    one.do(case())
    one.nothing_is_left()
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".log")] == []
    one.close()
