"""Requests to one `TransformersEngine`, alone and together, and what must be equal of two responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from flowgraph.engines.protocol import Generation, Sampling, Side
from flowgraph.engines.transformers import TransformersEngine

SLOTS, CONTEXT = 4, 40


def engine_of(where: Path, *, slots: int = SLOTS, dtype: str = "float32") -> TransformersEngine:
    # One thread: such small products gain nothing from a second one, and lose much on a busy machine.
    return TransformersEngine(str(where), slots=slots, context=CONTEXT, dtype=dtype, threads=1)


class Ask:
    """The arguments of one request."""

    def __init__(
        self, prompt: Iterable[int], new: int = 8, key: int = 1, temperature: float = 1.0, **more: Any
    ):
        self.prompt = np.array(list(prompt), np.int32)
        self.sampling = Sampling(max_new_tokens=new, temperature=temperature, **more)
        self.key = key

    def of(self, engine: TransformersEngine, rid: str = "r") -> Coroutine[Any, Any, Generation]:
        return engine.generate(self.prompt, self.sampling, key=self.key, rid=rid)


def alone(engine: TransformersEngine, ask: Ask) -> Generation:
    return asyncio.run(ask.of(engine))


def together(engine: TransformersEngine, asks: list[Ask]) -> list[Generation]:
    async def main() -> list[Generation]:
        return await asyncio.gather(*(ask.of(engine, f"r{i}") for i, ask in enumerate(asks)))

    return asyncio.run(main())


def same_bits(one: Generation, other: Generation) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    assert one.logprobs.tobytes() == other.logprobs.tobytes()
    assert (one.finish_reason, one.versions.tolist()) == (other.finish_reason, other.versions.tolist())
    assert one.side.keys() == other.side.keys()
    for name, side in one.side.items():
        same_side(side, other.side[name])


def same_side(one: Side, other: Side) -> None:
    assert one.values.dtype == other.values.dtype
    np.testing.assert_array_equal(one.values, other.values)
    np.testing.assert_array_equal(one.recorded, other.recorded)


def is_idle(engine: TransformersEngine) -> bool:
    load = engine.load()
    return (load.running, load.waiting) == (0, 0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition was never met")


def neighbours(count: int, seed: int, **more: Any) -> list[Ask]:
    random = np.random.default_rng(seed)
    return [
        Ask(
            random.integers(0, 256, random.integers(1, 20)),
            int(random.integers(1, 16)),
            key=int(random.integers(0, 1 << 63)),
            temperature=float(random.choice([0, 0.5, 1])),
            **more,
        )
        for _ in range(count)
    ]
