"""Replay: the learner's forward passes choose what rollout chose, and say where they executed something else.

Shapes: T packed positions, G of them recorded; L layers, of which M make this choice; K choices of a token in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from flowgraph.models.choices import Captured, Choices
from flowgraph.models.positions import Positions

from .metrics import share
from .pack import Ints, Micro
from .protocol import Rows
from .side import Bools, differs, lay, lay_positions


class Channel(Protocol):
    """One side channel of a loaded model. metric: of how much was executed otherwise than recorded."""

    metric: str

    @property
    def model(self) -> Choices | Positions: ...

    def lay(self, micro: Micro, values: Any, recorded: Bools) -> tuple[Ints, Bools]:
        """What to put in, [T, L, K], and where: bool[T]."""
        ...

    def differs(self, executed_GLK: Ints, put_GLK: Ints, at_G: Ints) -> Bools:
        """bool[G, M]: whether they differ as sets. at_G: the tokens' packed positions."""
        ...


class _Experts:
    metric = "routing_mismatch"

    def __init__(self, model: Any) -> None:
        self.model = Choices(model)
        self._layers = list(self.model.moe_layers)

    def lay(self, micro: Micro, values: Any, recorded: Bools) -> tuple[Ints, Bools]:
        return lay(micro, values, recorded)

    def differs(self, executed_GLK: Ints, put_GLK: Ints, at_G: Ints) -> Bools:
        return differs(executed_GLK[:, self._layers], put_GLK[:, self._layers])


class _Indexed:
    metric = "indexer_mismatch"

    def __init__(self, model: Any) -> None:
        self.model = Positions(model)

    def lay(self, micro: Micro, values: Any, recorded: Bools) -> tuple[Ints, Bools]:
        found = lay_positions(micro, values, recorded)
        return found.at_TLK, found.given_T

    def differs(self, executed_GLK: Ints, put_GLK: Ints, at_G: Ints) -> Bools:
        own_G11 = at_G[:, None, None]  # what lies behind a token is masked: it is no choice
        return differs(np.minimum(executed_GLK, own_G11), put_GLK)


CHANNELS: dict[str, Callable[[Any], Channel]] = {"routed_experts": _Experts, "indexer_topk": _Indexed}


def channel(name: str, model: Any) -> Channel:
    """Raises ValueError for an unknown one, ModelError for a model that has no such choice."""
    if name not in CHANNELS:
        raise ValueError(f"a learner replays {' and '.join(CHANNELS)}, and no {name}")
    return CHANNELS[name](model)


class Replay:
    """The side channels of one batch, over all its forward passes.

    rows: with side channels as `flowgraph.engines.protocol.Side` has them; channels: those of the model
    force: put them in where they were recorded; else they are only compared with what the model chooses

    Raises ValueError for one that doesn't fit the model.
    """

    def __init__(self, channels: Mapping[str, Channel], rows: Rows, *, force: bool) -> None:
        assert rows.recorded is not None
        self._rows, self._recorded, self._force = rows, rows.recorded, force
        self._channels = {name: channels[name] for name in rows.side}
        for name, one in self._channels.items():
            wanted = [one.model.layers, one.model.top_k]
            if list(rows.side[name].shape[1:]) != wanted:
                raise ValueError(
                    f"{name} must be [token, {wanted[0]} layers, {wanted[1]}] for this model, not "
                    f"{list(rows.side[name].shape)}"
                )
        self._laid = self._given = 0
        self._compared = dict.fromkeys(self._channels, 0)
        self._differ = dict.fromkeys(self._channels, 0)

    @contextmanager
    def forward(self, micro: Micro) -> Iterator[None]:
        """Around one forward pass of this micro-batch. However it ends, the model chooses for itself afterwards."""
        sides = [(name, one, self._rows.side[name]) for name, one in self._channels.items()]
        laid = {name: one.lay(micro, values, self._recorded) for name, one, values in sides}
        with ExitStack() as inside:
            if self._force:
                for name, one in self._channels.items():
                    put_TLK, given_T = laid[name]
                    inside.enter_context(
                        one.model.force(torch.from_numpy(put_TLK), torch.from_numpy(given_T))
                    )
            executed: dict[str, Captured] = {}
            for name, one in self._channels.items():
                executed[name] = inside.enter_context(one.model.capture())
            yield
        for name, one in self._channels.items():
            put_TLK, given_T = laid[name]
            executed_GLK = executed[name].indices.numpy()[given_T]
            wrong_GM = one.differs(executed_GLK, put_TLK[given_T], np.flatnonzero(given_T))
            self._compared[name] += wrong_GM.size
            self._differ[name] += int(wrong_GM.sum())
        real_T = micro.source_T >= 0
        self._laid += int(real_T.sum())
        self._given += int(self._recorded[micro.source_T[real_T]].sum())

    def sums(self) -> dict[str, float]:
        """As metrics over the tokens that were computed, a prefix that rows share once (see `metrics.share`).

        recorded: the share of them of which rollout's choices were recorded
        routing_mismatch, indexer_mismatch: of these, in every layer that makes the choice, the share for which another
        set was executed than the recorded one; left out where nothing was recorded
        """
        found = share("recorded", self._given, self._laid)
        for name, one in self._channels.items():
            found |= share(one.metric, self._differ[name], self._compared[name])
        return found
