"""What the processes of one owner give for each row of a step: each writes its part, and the first joins them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flowgraph.plan.layout import spans
from flowgraph.plan.parts import by_row
from flowgraph.plan.plan import Hop, Owner, Plan
from flowgraph.runtime import writing
from flowgraph.runtime.arena import Arena, part_areas, part_bytes
from flowgraph.runtime.copying import Copy, copy
from flowgraph.runtime.desk import Desk, Stored, block_bytes
from flowgraph.runtime.messages import Join, Part, Share
from flowgraph.runtime.pages import Pages
from flowgraph.runtime.pieces import Made, join, whole_sizes
from flowgraph.runtime.reading import Inputs
from flowgraph.runtime.seats import Seat


class Parts:
    """One process's place for its parts. They lie in memory that the first process reads; its own, in its own.

    desk: where the whole is written, the owner's; at: hop → where its last part lies, which is free when it fires again
    """

    def __init__(self, plan: Plan, owner: Owner, rank: int, arenas: Mapping[str, Arena], desk: Desk) -> None:
        own = arenas[Seat(owner.name, rank).name] if rank else Arena(Pages(-1, part_bytes(plan, owner.name)))
        others = [arenas[Seat(owner.name, other).name] for other in range(1, owner.processes) if not rank]
        self.views = [arena.view for arena in (own, *others)]
        self.own = Desk(own, part_areas(plan, owner.name), threads=desk.threads)
        self.rank, self.desk = rank, desk
        self.at: dict[str, int] = {}

    def store(
        self, hop: Hop, share: Share, values: Mapping[str, Any], given: writing.Checked, omit: Collection[str],
        inputs: Inputs,
    ) -> Stored:  # fmt: skip
        """Write what this process keeps of a hop's outputs: its part of what they give for each row; of all else the
        first keeps the whole.
        """
        if not by_row(hop):
            return (
                self.desk.store(hop, values, given, omit, inputs) if not self.rank else Stored(-1, 0, (), {})
            )
        if hop.name in self.at:
            self.own.free({hop.name: (self.at.pop(hop.name),)})
        stored = self.own.store(hop, values, given, omit, inputs)
        if stored.offset >= 0:
            self.at[hop.name] = stored.offset
            return stored
        return stored._replace(sizes=whole_sizes(hop, stored.sizes, share))

    def join(self, hop: Hop, message: Join) -> Part:
        """The whole of what all have written, in a block of the owner's."""
        began = time.monotonic()
        made = [Made(*one) for one in zip(message.shares, self.views, message.blocks, strict=True)]
        sizes = whole_sizes(hop, made[0].block.sizes, made[0].share)
        where = spans(hop, dict(zip(hop.dims, sizes, strict=True)))
        nbytes = block_bytes(hop, sizes)
        offset = self.desk.take(hop.name, nbytes)
        view, copies = self.desk.arena.view, []
        for name, stored in join(hop, made):
            target = np.frombuffer(view, stored.dtype, stored.size, offset + where[name].start)
            copies.append(Copy(target.reshape(stored.shape), stored))
        copy(copies, self.desk.threads)
        return Part(offset, nbytes, sizes, {}, {}, (), 0, time.monotonic() - began, placed=0, joined=0)
