"""A sync that is interrupted anywhere: the machine by itself, and fleets of simulated servers under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from simulated import FAULTS, PATHS, Fault, World, logprob, prompt, run, token

from flowgraph.engines.fleet import Fleet
from flowgraph.engines.protocol import PAUSE_MODES, Generation, PauseMode, Sampling, Synced
from flowgraph.engines.sync import ACTIONS, Action, State, Sync
from flowgraph.errors import EngineFailed

# --- the machine ------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.sampled_from(["begin", "begin", "done", "failed"]), st.sampled_from(ACTIONS)))


@given(steps)
def test_the_machine_allows_exactly_the_five_actions_in_order_and_any_time_the_start(
    given: list[tuple[str, Action]],
) -> None:
    sync, chain, active = Sync(), [], None  # chain: the actions done since the last start, none failed
    for version, (what, action) in enumerate(given):
        if what == "begin":
            follows = ACTIONS[ACTIONS.index(action) - 1 : ACTIONS.index(action)] == tuple(chain[-1:])
            allowed = active is None and (action == "pause" or (bool(chain) and follows))
            if not allowed:
                before = msgspec.structs.astuple(sync)
                with pytest.raises(RuntimeError, match=f"{action} in state {sync.state}"):
                    sync.begin(action)
                assert msgspec.structs.astuple(sync) == before
                continue
            sync.begin(action)
            active = action
        elif what == "done" and active is not None:
            sync.done(active, version)
            chain = [*chain, active] if active != "pause" else [active]
            active = None
        elif what == "failed":
            sync.failed()
            chain, active = [], None
        whole = "update" in chain and active != "update"
        assert sync.serves(sync.version) == (tuple(chain) == ACTIONS and active is None)
        assert sync.state in get_args(State)
        assert sync.version >= 0 or not whole
        if sync.state in ("serving", "resumed"):
            assert whole
        if not chain and active is None:
            assert sync.state == "out"


# --- fleets -----------------------------------------------------------------------------------------------------


class Asked(msgspec.Struct):
    """A request: what was asked, and the versions that it may be sampled from."""

    key: int
    budget: int
    task: Any
    versions: set[int]


class Scenario:
    """What is done to a fleet, and whether what it does is right."""

    def __init__(self, world: World) -> None:
        self.world, self.fleet = world, world.fleet
        self.asked: list[Asked] = []
        self.version = 0
        self.failed = 0

    def ask(self, budget: int) -> Asked:
        key = 1000 + 13 * len(self.asked)
        call = self.fleet.generate(prompt(key % 3), Sampling(budget), key=key, rid=f"r{key}")
        self.asked.append(Asked(key, budget, asyncio.ensure_future(call), {self.version}))
        return self.asked[-1]

    async def sync(self, step: int, pause: PauseMode, seconds: float) -> Synced | None:
        self.version = max(0, self.version + step)
        for asked in self.asked:
            asked.versions.add(self.version)
        clock = asyncio.get_running_loop().time
        began, before = clock(), self.fleet.version
        try:
            synced = await self.fleet.sync({}, self.version, pause=pause, seconds=seconds)
        except EngineFailed:
            self.failed += 1
            assert self.fleet.version == before
            return None
        finally:
            assert clock() - began <= seconds + 0.1
        assert synced.version == self.fleet.version == self.version
        assert synced.replicas >= 1
        return synced

    def check(self, asked: Asked, out: Generation) -> None:
        """Each token once, as in an uninterrupted response, from the versions that there were."""
        size = len(out.ids)
        assert size == len(out.logprobs) == len(out.versions)
        assert out.ids.tolist() == [token(asked.key, at) for at in range(size)]
        pairs = zip(out.ids.tolist(), out.versions.tolist(), strict=True)
        assert out.logprobs.tolist() == [logprob(id, version) for id, version in pairs]
        assert set(out.versions.tolist()) <= asked.versions
        if out.finish_reason == "length":
            assert size == asked.budget  # M5: what is left of it is what counts
        else:
            assert out.finish_reason == "abort"

    async def everything_is_well(self) -> None:
        """With no more faults: the next sync succeeds, every replica comes back, no request is left."""
        self.world.heal()
        assert await self.sync(1, "retract", 60.0) is not None
        async with asyncio.timeout(600.0):
            await asyncio.wait(
                [asked.task for asked in self.asked] or [asyncio.ensure_future(asyncio.sleep(0))]
            )
            while not all(m.sync.serves(self.version) for m in self.fleet.members):
                await asyncio.sleep(1.0)
            last = self.ask(3)
            self.check(last, await last.task)
        assert set(last.task.result().versions) == {self.version}
        names = {f"127.0.0.1:{p.port}" for p in self.world.processes}
        for url, server in self.world.servers.items():
            if url.removeprefix("http://") in names or url.startswith("http://theirs"):
                assert (server.weights, server.paused, server.released) == (str(self.version), False, False)


Ops = list[tuple[Any, ...]]

ops: st.SearchStrategy[Ops] = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 30)),
        st.tuples(
            st.just("sync"),
            st.sampled_from([1, 1, 0, -1]),
            st.sampled_from(PAUSE_MODES),
            st.sampled_from([1.0, 20.0, 60.0]),
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.05, 0.3, 4.0, 20.0])),
        st.tuples(st.just("abort"), st.integers(0, 5)),
    ),
    min_size=3,
    max_size=12,
)
faults = st.lists(
    st.builds(
        Fault,
        st.sampled_from([*PATHS.values(), *PATHS.values(), "/generate", "/model_info", "/v1/loads"]),
        st.sampled_from(FAULTS),
        st.sampled_from([0, 0, 1, 2]),
    ),
    min_size=1,
    max_size=5,
)


async def play(scenario: Scenario, ops: Ops) -> None:
    aborted: set[int] = set()
    for what, *how in ops:
        if what == "ask":
            scenario.ask(*how)
        elif what == "sync":
            await scenario.sync(*how)
        elif what == "wait":
            await asyncio.sleep(how[0])
        elif how[0] < len(scenario.asked):
            key = scenario.asked[how[0]].key
            if scenario.fleet.abort(f"r{key}"):
                aborted.add(key)
    event(f"{len(scenario.world.happened)} faults, {scenario.failed} syncs failed")
    await scenario.everything_is_well()
    for asked in scenario.asked:
        if (error := asked.task.exception()) is not None:
            assert isinstance(error, EngineFailed)
            assert scenario.failed or len(scenario.world.happened) >= 3  # as many as a replica is tried
            event("a request failed by name")
            continue
        out = asked.task.result()
        scenario.check(asked, out)
        assert out.finish_reason == "length" or asked.key in aborted


@given(st.lists(st.booleans(), min_size=1, max_size=3), ops, faults)
@settings(deadline=None, max_examples=200)
def test_whatever_fails_and_whenever_the_right_version_is_served_in_the_end_and_each_request_returned_once(
    owned: list[bool], ops: Ops, faults: list[Fault]
) -> None:
    async def main() -> None:
        world = World(tuple(owned))
        await world.start()
        world.faults = list(faults)
        world.seen.clear()
        await play(Scenario(world), ops)
        await world.end()

    run(main())


@given(
    st.sampled_from(list(PATHS.values())),
    st.sampled_from(FAULTS),
    st.sampled_from(PAUSE_MODES),
    st.integers(1, 2),
    st.booleans(),
)
@settings(deadline=None)
def test_one_fault_in_a_sync_costs_at_most_another_attempt(
    path: str, kind: str, pause: PauseMode, servers: int, owned: bool
) -> None:
    """Of two replicas the other serves at once; a request under way is never failed."""

    assume(kind != "half" or path == PATHS["update"])

    async def main() -> None:
        world = World((owned,) * servers)
        await world.start()
        scenario = Scenario(world)
        for _ in range(4):
            scenario.ask(40)
        await asyncio.sleep(1.0)
        world.seen.clear()
        world.faults = [Fault(path, kind)]
        skipped = pause == "in_place" or not owned
        synced = await scenario.sync(1, pause, 60.0)
        stuck = kind == "hang" and not owned and path not in (PATHS["release"], PATHS["resume"])
        if stuck and servers == 1:
            assert synced is None
        else:
            assert synced is not None
            assert synced.replicas == servers - stuck
            never = skipped and path in (PATHS["release"], PATHS["resume"])
            assert synced.retries == (0 if never or stuck else 1)
        for asked in scenario.asked:
            if not (stuck and servers == 1):
                out = await asyncio.wait_for(asked.task, 20.0)
                scenario.check(asked, out)
                assert len(out.ids) == asked.budget
        await scenario.everything_is_well()
        await world.end()

    run(main())


@given(
    st.lists(st.booleans(), min_size=1, max_size=2), faults, st.floats(0.0, 8.0), st.sampled_from(PAUSE_MODES)
)
@settings(deadline=None)
def test_close_at_any_moment_leaves_no_process_no_task_and_no_request(
    owned: list[bool], faults: list[Fault], moment: float, pause: PauseMode
) -> None:
    async def main() -> None:
        world = World(tuple(owned))
        await world.start()
        world.seen.clear()
        world.faults = list(faults)
        scenario = Scenario(world)
        asked = [scenario.ask(30) for _ in range(3)]
        await asyncio.sleep(0.5)
        sync = asyncio.ensure_future(world.fleet.sync({}, 1, pause=pause))
        await asyncio.sleep(moment)
        await world.end()
        done = await asyncio.gather(sync, *(a.task for a in asked), return_exceptions=True)
        for result in done:
            assert isinstance(result, Synced | Generation | EngineFailed | RuntimeError), result

    run(main())


# --- cases with a name ------------------------------------------------------------------------------------------


def played(owned: tuple[bool, ...], story: Callable[[World, Scenario], Awaitable[None]]) -> World:
    async def main() -> World:
        world = World(owned)
        await world.start()
        world.seen.clear()
        scenario = Scenario(world)
        await story(world, scenario)
        await scenario.everything_is_well()
        for asked in scenario.asked:
            if asked.task.exception() is None:
                scenario.check(asked, asked.task.result())
        await world.end()
        return world

    return run(main())


def test_w2_an_update_that_always_fails_half_way_leaves_the_engine_out_of_rotation_and_its_version_unchanged() -> (
    None
):
    async def story(world: World, scenario: Scenario) -> None:
        asked = scenario.ask(50)
        await asyncio.sleep(1.0)
        world.faults = [Fault(PATHS["update"], "half")] * 3
        assert await scenario.sync(1, "retract", 60.0) is None
        assert world.fleet.version == 0
        with pytest.raises(EngineFailed, match="the other half is missing"):
            await asked.task
        with pytest.raises(EngineFailed, match="no replica serves version 1"):
            await scenario.ask(3).task

    world = played((True,), story)
    said = [e.said for e in world.journal if (e.action, e.outcome) == ("update", "failed")]
    assert len(said) == 3
    assert all("the other half is missing" in text for text in said)


@pytest.mark.parametrize("named", ["default", "0"])
def test_w3_a_server_that_somebody_restarts_serves_nothing_before_it_has_the_newest_weights(
    named: str,
) -> None:
    async def story(world: World, scenario: Scenario) -> None:
        world.anew = named
        await scenario.sync(1, "retract", 60.0)
        world.faults = [Fault("/v1/loads", "kill before")]
        await asyncio.sleep(8.0)  # it is back, and says that it is well
        out = await scenario.ask(5).task
        assert set(out.versions) == {1}

    world = played((False,), story)
    said = "it sampled from version 0 after it had 1" if named == "0" else "is none of ours"
    assert any(said in e.said for e in world.journal)


def test_w6_m5_an_aborted_request_goes_on_where_it_was_with_what_is_left_of_its_budget() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        asked = scenario.ask(50)
        for _ in range(3):
            await asyncio.sleep(1.0)
            await scenario.sync(1, "abort", 60.0)
        out = await asked.task
        assert len(out.ids) == 50
        assert sorted(set(out.versions.tolist())) == [0, 1, 2, 3]

    world = played((True, True), story)
    assert len(world.asked) == 4 + 1


def test_w7_an_aborted_segment_without_a_token_is_dispatched_again() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        asked = scenario.ask(4)
        await asyncio.sleep(0.02)  # it is being prefilled
        await scenario.sync(1, "abort", 60.0)
        assert set((await asked.task).versions) == {1}
        assert len((await asked.task).ids) == 4

    world = played((True,), story)
    assert len(world.asked) == 2 + 1


def test_w10_a_request_whose_answer_was_lost_is_returned_once_under_another_name() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        world.faults = [Fault("/generate", "cut after")]
        out = await scenario.ask(10).task
        assert len(out.ids) == 10

    world = played((True,), story)
    assert len(world.asked) == len(set(world.asked)) == 2 + 1


@pytest.mark.parametrize("owned", [True, False])
def test_w13_an_update_that_hangs_has_a_deadline_and_the_engine_is_replaced_if_it_is_ours_else_stays_out(
    owned: bool,
) -> None:
    async def story(world: World, scenario: Scenario) -> None:
        asked = scenario.ask(50)
        await asyncio.sleep(1.0)
        first = world.processes[0].port if owned else 0
        world.faults = [Fault(PATHS["update"], "hang")]
        synced = await scenario.sync(1, "retract", 60.0)
        if owned:
            assert synced is not None
            assert synced.retries == 1
            assert world.processes[0].port == first + 1
            assert len((await asked.task).ids) == 50
        else:
            assert synced is None
            (server,) = world.servers.values()
            assert server.paused
            with pytest.raises(EngineFailed):
                await asked.task

    world = played((owned,), story)
    assert any("it did not update in 30.0 s" in e.said for e in world.journal)


def test_what_waits_at_a_replica_that_hangs_goes_to_another_once_the_sync_has_given_it_up() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        for _ in range(4):
            scenario.ask(40)
        await asyncio.sleep(1.0)
        world.faults = [Fault(PATHS["update"], "hang")]
        synced = await scenario.sync(1, "retract", 20.0)
        assert synced is not None
        assert synced.replicas == 1
        async with asyncio.timeout(5.0):
            for asked in scenario.asked:
                assert len((await asked.task).ids) == 40

    played((False, False), story)


def test_a_server_that_stops_while_it_has_requests_is_replaced_and_they_go_on() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        world.faults = [Fault("/generate", "hang")]
        began = asyncio.get_running_loop().time()
        out = await scenario.ask(10).task
        assert len(out.ids) == 10
        assert asyncio.get_running_loop().time() - began < 60.0

    world = played((True, True), story)
    assert "failed" in [e.outcome for e in world.journal if e.action == "serve"]


def test_a_repeated_sync_and_one_to_a_lower_version_are_syncs_like_any_other() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        for step in (1, 0, -1):
            asked = scenario.ask(20)
            await asyncio.sleep(0.5)
            assert await scenario.sync(step, "retract", 60.0) is not None
            assert len((await asked.task).ids) == 20

    world = played((True,), story)
    assert len(world.asked) == 3 + 1


def test_a_sync_ends_a_recovery_that_is_under_way_and_brings_the_replica_itself() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        world.faults = [Fault("/generate", "kill before")]
        asked = scenario.ask(10)
        await asyncio.sleep(1.0)  # its successor is starting
        assert await scenario.sync(1, "retract", 60.0) is not None
        assert set((await asked.task).versions) == {1}

    played((True,), story)


def test_weights_that_do_not_fit_change_nothing_and_a_recovery_goes_on() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        fleet: Fleet = world.fleet
        stage = fleet.rotation.stage

        def refuse(weights: Any, version: int) -> Any:
            raise ValueError("no weight was changed: 'x' is missing")

        world.faults = [Fault("/generate", "kill before")]
        asked = scenario.ask(10)
        await asyncio.sleep(1.0)
        fleet.rotation.stage = refuse
        with pytest.raises(ValueError, match="'x' is missing"):
            await fleet.sync({}, 1)
        fleet.rotation.stage = stage
        assert fleet.version == 0
        assert set((await asked.task).versions) == {0}

    played((True,), story)


def test_who_cancels_a_sync_gets_requests_that_fail_by_name_and_an_engine_that_the_next_sync_brings() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        asked = scenario.ask(50)
        await asyncio.sleep(1.0)
        sync = asyncio.ensure_future(world.fleet.sync({}, 1))
        await asyncio.sleep(0.2)
        sync.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sync
        with pytest.raises(EngineFailed):
            await asked.task
        scenario.version = 1

    played((True,), story)


def test_a_replica_that_was_out_before_a_sync_holds_nobody_up() -> None:
    async def story(world: World, scenario: Scenario) -> None:
        world.faults = [Fault("/v1/loads", "kill before")]
        await asyncio.sleep(2.5)
        synced = await scenario.sync(1, "retract", 60.0)
        assert synced is not None
        assert synced.replicas == 1
        assert synced.seconds < 2.0

    played((True, True), story)
