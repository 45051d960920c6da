"""An engine in server processes, each behind a proxy that fails when it is told to, and what is right after a fault."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from proxy import Moment, Proxy
from running import NEAR, Running
from served_model import ServedModel

from flowgraph.engines.protocol import Generation, PauseMode, Synced
from flowgraph.engines.registry import EngineOptions
from flowgraph.engines.served.client import Client
from flowgraph.engines.sync import ACTIONS, Entry

PATHS = {
    "pause": "/pause_generation",
    "release": "/release_memory_occupation",
    "update": "/update_weights_from_disk",
    "resume": "/resume_memory_occupation",
    "continue": "/continue_generation",
}
PROMPT = np.random.default_rng(6).integers(0, 256, 48)
PROBE = PROMPT[:32]
SLOTS = 4  # of each server
LONG = 240
DEADLINE = 60.0  # of a sync
KINDS = ("base", "other")  # of the weights of even and of odd versions


class Faulty:
    """reference: kind of weights → the log-probabilities of PROBE, by another engine that holds them"""

    def __init__(
        self,
        options: EngineOptions,
        model: ServedModel,
        logs: Path,
        reference: dict[str, np.ndarray[Any, Any]],
        bits: bool = True,
    ) -> None:
        self.reference, self.bits = reference, bits
        self.running = Running("faults", options, model, logs)
        self.journal: list[Entry] = []
        self.running.seen = self.journal.append
        self.proxies: list[Proxy] = []
        self.running.do(self._interpose())

    async def _interpose(self) -> None:
        for member in self.engine.members:
            replica: Any = member.replica
            proxy = Proxy(lambda replica=replica: replica._process.port)
            await proxy.listen()
            replica._connect = lambda url, proxy=proxy: Client(proxy.url)
            await replica._client.close()
            replica._client = Client(proxy.url)
            self.proxies.append(proxy)

    @property
    def engine(self) -> Any:
        return self.running.engine

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.running.do(work)

    def signal(self, number: signal.Signals, at: int = 0) -> None:
        pid = self.engine.members[at].replica.pid
        assert pid
        os.kill(pid, number)

    def kill(self, at: int = 0) -> None:
        self.signal(signal.SIGKILL, at)

    def close(self) -> None:
        async def end() -> None:
            for proxy in self.proxies:
                await proxy.refuse()

        if not self.running.closed:
            self.do(end())
        self.running.close()

    def nothing_is_left(self) -> None:
        """In /dev/shm, of what these servers make; others on this machine have names of their own there."""
        assert not {name for name in self.running.left() if not name.startswith(("sem.", "sglang_"))}

    # --- what is done, and what is right afterwards ---------------------------------------------------------------

    async def sync(self, pause: PauseMode = "retract", seconds: float = DEADLINE) -> Synced:
        """To the next version; its weights are unlike those before."""
        version = self.engine.version + 1
        weights = self.running.model.weights(KINDS[version % 2])
        async with asyncio.timeout(seconds + 5.0):
            synced: Synced = await self.engine.sync(weights, version, pause=pause, seconds=seconds)
        assert synced.version == self.engine.version == version
        assert synced.seconds < seconds + 1.0
        return synced

    def ask_many(self, count: int = 6) -> list[asyncio.Task[Generation]]:
        asked = (self.running.ask(PROMPT[: 20 + k], LONG, key=k) for k in range(count))
        return [asyncio.ensure_future(one) for one in asked]

    async def sync_with_requests_under_way(
        self, pause: PauseMode, seconds: float = DEADLINE
    ) -> tuple[Synced, list[Generation]]:
        tasks = self.ask_many()
        await self.running.until(lambda load: load.running >= SLOTS)
        self.journal.clear()
        synced = await self.sync(pause, seconds)
        async with asyncio.timeout(60.0):
            return synced, list(await asyncio.gather(*tasks))

    def check_requests(self, outs: list[Generation], pause: PauseMode, versions: set[int]) -> None:
        """All whole; each token has the log-probability that the weights of its version give it."""
        for k, out in enumerate(outs):
            self.running.fits(out)
            assert (len(out.ids), out.finish_reason) == (LONG, "length")
            assert set(out.versions.tolist()) <= versions
            assert (np.diff(out.versions) >= 0).all()
            seen = set(out.versions.tolist())
            for version in seen:
                if pause == "in_place" and version > out.versions[0]:
                    continue  # its later tokens see keys of the old weights
                part = out.versions == version
                forced = self.running.forced(PROMPT[: 20 + k], out, KINDS[version % 2])
                np.testing.assert_allclose(out.logprobs[part], forced[part], atol=NEAR, rtol=0)

    def play(
        self, fault: str, action: str, moment: Moment, pause: PauseMode, seconds: float = DEADLINE
    ) -> Synced:
        """A sync of the only server with one fault in it, and requests under way: two attempts, and all is well.

        fault: killed, or cut (the connection)
        """

        async def case() -> Synced:
            old, pid = self.engine.version, self.running.processes()
            (proxy,) = self.proxies
            proxy.trap(PATHS[action], moment, self.kill if fault == "killed" else lambda: None)
            sprung = len(proxy.sprung)
            synced, outs = await self.sync_with_requests_under_way(pause, seconds)
            assert len(proxy.sprung) == sprung + 1
            assert (synced.retries, synced.replicas) == (1, 1)
            assert (self.running.processes() != pid) == (fault == "killed")
            self.check_requests(outs, pause, {old, old + 1})
            assert old + 1 in {
                int(out.versions[-1]) for out in outs
            }  # some ended before a pause that was lost
            assert self.story() == interrupted(action)
            await self.check_served()
            await self.running.until(lambda load: load.running == load.waiting == 0)
            return synced

        synced: Synced = self.do(case())
        return synced

    async def check_served(self) -> None:
        """What is served is the newest version, in every replica that is in rotation, and nothing else."""
        version = self.engine.version
        want = self.reference[KINDS[version % 2]]
        for member in self.engine.members:
            if member.sync.serves(version):
                got = await member.replica.logprobs(PROBE)
                if self.bits:
                    np.testing.assert_array_equal(got, want)
                else:
                    np.testing.assert_allclose(got, want, atol=NEAR, rtol=0)
        outs = await asyncio.gather(*(self.running.ask(PROMPT[:9], 4, key=key) for key in range(4)))
        assert {v for out in outs for v in out.versions.tolist()} == {version}

    async def until_all_serve(self, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not all(m.sync.serves(self.engine.version) for m in self.engine.members):
                await asyncio.sleep(0.05)

    def story(self, at: int = 0) -> list[tuple[int, str, str]]:
        """The journal of one replica: attempt, action, and how it ended."""
        name = self.engine.members[at].replica.name
        return [
            (e.attempt, e.action, e.outcome)
            for e in self.journal
            if e.replica == name and e.outcome != "begun"
        ]


def interrupted(action: str) -> list[tuple[int, str, str]]:
    """The journal of a sync whose first attempt fails at that action."""
    before = ACTIONS[: ACTIONS.index(action)]  # type: ignore[arg-type]
    return [
        *((1, done, "done") for done in before),
        (1, action, "failed"),
        *((2, done, "done") for done in ("start", *ACTIONS)),
    ]
