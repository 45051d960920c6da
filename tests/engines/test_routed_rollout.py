"""A rollout with side channels is a rollout like any other: its metrics, its limits, and responses without a token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experts import routing, save_experts

from flowgraph import Rejected
from flowgraph.engines.embedded import embedded_fleet
from flowgraph.engines.fleet import Fleet
from flowgraph.engines.registry import TransformersOptions
from hops.replay import Routed, rollout_routed
from hops.rollout import Trajectory, complete

CONTEXT = 32
SHAPE: dict[str, Any] = {"layers": 3, "top_k": 2}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_experts(tmp_path_factory.mktemp("experts") / "qwen", "qwen")


def on_engine(model: Path, work: Callable[[Fleet], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        options = TransformersOptions(model="qwen", slots=2, dtype="float32")
        fleet = await embedded_fleet(options, str(model), context=CONTEXT, threads=1)
        try:
            return await work(fleet)
        finally:
            await fleet.close()

    return asyncio.run(run())


def test_it_gives_what_complete_gives_and_the_experts_of_each_token_but_the_last(qwen: Path) -> None:
    prompt, key = np.arange(9, dtype=np.int32), np.array(7, np.uint64)

    async def both(engine: Fleet) -> tuple[Trajectory, Routed]:
        plain = await complete(prompt, key, engine=engine, max_new_tokens=8)
        return plain, await rollout_routed(prompt, key, engine=engine, max_new_tokens=8, **SHAPE)

    plain, routed = on_engine(qwen, both)
    for name in Trajectory._fields:
        np.testing.assert_array_equal(getattr(routed, name), getattr(plain, name))
    assert routed.recorded.tolist() == [True] * 16 + [False]
    assert routed.routed_experts.dtype == np.uint8
    wanted = routing(qwen, plain.tokens.tolist())
    np.testing.assert_array_equal(np.sort(routed.routed_experts, axis=-1)[:-1], wanted[:-1])


def test_an_empty_response_is_a_trajectory_of_which_nothing_was_recorded(qwen: Path) -> None:
    prompt = np.arange(CONTEXT, dtype=np.int32)
    made: Routed = on_engine(
        qwen,
        lambda engine: rollout_routed(
            prompt, np.array(7, np.uint64), engine=engine, max_new_tokens=8, **SHAPE
        ),
    )
    assert made.tokens.tolist() == prompt.tolist()
    assert not made.response_mask.any()
    assert not made.recorded.any()
    assert made.routed_experts.shape == (CONTEXT, 3, 2)
    assert (made.metrics["length"], made.metrics["truncated"]) == (0, 1)


def test_one_that_is_late_is_rejected(qwen: Path) -> None:
    async def late(engine: Fleet) -> None:
        with pytest.raises(Rejected, match="time limit"):
            await rollout_routed(
                np.arange(3, dtype=np.int32), np.array(7, np.uint64), engine=engine, max_new_tokens=29,
                time_limit=1e-4, **SHAPE,
            )  # fmt: skip
        while engine.load().running:  # its slot is free with the next step
            await asyncio.sleep(0)

    on_engine(qwen, late)
