"""A replica in this very process: nothing crosses to it, and it ends only with its process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowgraph.engines.fleet import Fleet
from flowgraph.engines.protocol import EngineLoad, Generation, PauseMode, Sampling
from flowgraph.engines.registry import TransformersOptions
from flowgraph.engines.stops import Stops
from flowgraph.engines.sync import Journal
from flowgraph.engines.transformers import TransformersEngine


class Embedded:
    """Implements `flowgraph.engines.protocol.Replica`. update takes the tensors themselves."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.name = "embedded"
        self.engine = engine

    async def start(self, seconds: float) -> None:
        pass

    def alive(self) -> bool:
        return True

    def kill(self) -> None:
        pass

    async def generate(
        self,
        prompt: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        key: int,
        drawn: int,
        rid: str,
        recorded: int = 0,
    ) -> Generation:
        return await self.engine.generate(prompt, sampling, key=key, drawn=drawn, rid=rid, recorded=recorded)

    async def abort(self, rid: str) -> None:
        self.engine.abort(rid)

    async def logprobs(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return self.engine.logprobs(tokens)

    async def pause(self, mode: PauseMode) -> None:
        self.engine.pause(mode)

    async def release(self) -> str:
        self.engine.release()
        return "" if self.engine.released else "requests keep their KV"

    async def update(self, weights: Mapping[str, Any], version: int) -> int:
        self.engine.update_weights(weights, version)
        return sum(tensor.nbytes for tensor in weights.values())

    async def resume(self) -> None:
        self.engine.resume()

    async def proceed(self) -> None:
        self.engine.proceed()

    @property
    def computed(self) -> float:
        return self.engine.computed

    @property
    def heard(self) -> EngineLoad:
        return self.engine.load()

    async def load(self) -> EngineLoad:
        return self.engine.load()

    async def close(self) -> None:
        self.engine.close()


async def embedded_fleet(
    options: TransformersOptions,
    model_dir: str,
    *,
    context: int,
    threads: int | None,
    logs: str = "",
    journal: Journal = lambda entry: None,
    patience: float = 600.0,
) -> Fleet:
    """An engine of one replica, in this process."""
    engine = TransformersEngine(
        model_dir, slots=options.slots, context=context, dtype=options.dtype, threads=threads
    )

    def stage(weights: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        engine.check_weights(weights)  # while it still serves the version before
        return weights

    fleet = Fleet(
        [Embedded(engine)],
        context=context,
        vocabulary=engine.vocabulary,
        stage=stage,
        initial={},
        completed=Stops(model_dir).end,
        journal=journal,
        patience=patience,
    )
    await fleet.start(fresh=True)
    return fleet
