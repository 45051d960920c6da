"""One request of the `transformers` engine: what was asked, and what it has so far; see there for its life."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from flowgraph.engines.protocol import FinishReason, Generation, Sampling
from flowgraph.engines.routing import Recording
from flowgraph.engines.sampling import uniform
from flowgraph.engines.stops import StopStrings


class Request:
    """One `generate` call, and the future that its caller awaits."""

    def __init__(
        self,
        rid: str,
        prompt: npt.NDArray[np.int32],
        sampling: Sampling,
        key: int,
        drawn: int,
        stops: StopStrings | None,
        recordings: Mapping[str, Recording],
    ) -> None:
        self.rid, self.prompt, self.sampling, self.stops = rid, prompt, sampling, stops
        self.key, self.drawn, self.recordings = key, drawn, recordings
        self.retractions = 0
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.slot: int | None = None
        self.future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    @property
    def position(self) -> int:
        """Where the newest token goes in the sequence."""
        return len(self.prompt) + len(self.ids) - 1

    @property
    def draw(self) -> float:
        """The random number of the next token."""
        return uniform(self.key, self.drawn + len(self.ids))

    def generation(self, reason: FinishReason) -> Generation:
        tokens = len(self.prompt) + len(self.ids)
        side = {name: one.side(tokens) for name, one in self.recordings.items()} if self.ids else {}
        return Generation(
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish_reason=reason,
            retractions=self.retractions,
            side=side,
        )
