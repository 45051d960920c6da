"""What a signal handler raises ends a run in one process, in whatever task it comes up."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import Int32, UInt64

from flowgraph import Array, hop
from flowgraph.runtime import executors
from tests.runtime.harness import run_toy
from tests.runtime.toy import Sampled


class Limit(BaseException):
    """As that of pytest's time limit, no Exception."""


@pytest.fixture
def limit() -> Iterator[None]:
    def strike(signum: int, frame: object) -> None:
        raise Limit

    before = signal.signal(signal.SIGUSR1, strike)
    yield
    signal.signal(signal.SIGUSR1, before)


async def _strike() -> None:
    signal.raise_signal(signal.SIGUSR1)


@hop(owner="rollout", lifetime="consumed")
async def beside(prompt: Int32[Array, "prompt"], key: UInt64[Array, ""]) -> Sampled:
    """Waits for what a task of its own, as an engine has one, would say."""
    kept = asyncio.ensure_future(_strike())
    await asyncio.Event().wait()
    raise AssertionError(kept)


@hop(owner="rollout", lifetime="consumed")
async def within(prompt: Int32[Array, "prompt"], key: UInt64[Array, ""]) -> Sampled:
    await _strike()
    raise AssertionError("the handler raises")


@hop(owner="rollout", lifetime="consumed")
async def called(prompt: Int32[Array, "prompt"], key: UInt64[Array, ""]) -> Sampled:
    """In a callback, which belongs to no task."""
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGUSR1)
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


@pytest.mark.parametrize("use", ["beside", "within", "called"])
@pytest.mark.usefixtures("limit")
def test_what_a_signal_handler_raises_ends_the_run(tmp_path: Path, use: str) -> None:
    """Not the deadline of 20 s."""
    began = time.monotonic()
    with pytest.raises(Limit):
        run_toy(tmp_path, f"hops.rollout={{use: {__name__}.{use}, in: {{prompt: dispatch, key: dispatch}}}}")
    assert time.monotonic() - began < 10


class Stuck:
    """A worker of which something waits for what will never be told."""

    async def close(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()


def test_a_worker_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "ENDING", 0.05)
    executor: Any = executors.InProcess()
    executor.workers["rollout"] = Stuck()
    executor.stop(0)
    assert executor.loop.is_closed()
