"""Replay: the learner's forward passes take the experts that rollout chose, and say where they executed others.

Shapes: T packed positions; L layers; K experts of a token in a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from flowgraph.models.choices import Choices

from .pack import Micro
from .protocol import Rows
from .side import differs, lay

ROUTED = "routed_experts"


class Replay:
    """The routing of one batch, over all its forward passes.

    rows: with the side channel `routed_experts` [token, layer, k], as `flowgraph.engines.protocol.Side` has it
    force: put it in where it was recorded; else it is only compared with what the model chooses

    Raises ValueError for another side channel, or one that doesn't fit the model.
    """

    def __init__(self, choices: Choices, rows: Rows, *, force: bool) -> None:
        if unknown := sorted(set(rows.side) - {ROUTED}):
            raise ValueError(f"this learner replays {ROUTED}, and no {unknown[0]}")
        self._values, self._force, self._choices = rows.side[ROUTED], force, choices
        assert rows.recorded is not None
        self._recorded = rows.recorded
        wanted = [choices.layers, choices.top_k]
        if list(self._values.shape[1:]) != wanted:
            raise ValueError(
                f"{ROUTED} must be [token, {wanted[0]} layers, {wanted[1]}] for this model, not "
                f"{list(self._values.shape)}"
            )
        self._laid = self._given = self._compared = self._differ = 0

    @contextmanager
    def forward(self, micro: Micro) -> Iterator[None]:
        """Around one forward pass of this micro-batch. However it ends, routers choose for themselves afterwards."""
        values_TLK, given_T = lay(micro, self._values, self._recorded)
        with ExitStack() as inside:
            if self._force:
                forced = torch.from_numpy(values_TLK), torch.from_numpy(given_T)
                inside.enter_context(self._choices.force(*forced))
            executed = inside.enter_context(self._choices.capture())
            yield
        layers = list(self._choices.moe_layers)
        wrong_GM = differs(executed.indices.numpy()[given_T][:, layers], values_TLK[given_T][:, layers])
        self._laid += int((micro.source_T >= 0).sum())
        self._given += len(wrong_GM)
        self._compared += wrong_GM.size
        self._differ += int(wrong_GM.sum())

    def metrics(self) -> dict[str, float]:
        """Over the tokens that were computed, a prefix that rows share once.

        routing_recorded: the share of them whose routing was recorded
        routing_mismatch: of these, in every layer that has experts, the share whose executed experts are others than
        the recorded ones, as sets; left out where nothing was recorded
        """
        found = {"routing_recorded": self._given / max(1, self._laid)}
        return found | ({"routing_mismatch": self._differ / self._compared} if self._compared else {})
