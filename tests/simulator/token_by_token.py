"""One engine, stepped token by token: what the service clock of `flowgraph.simulator.engines` has to agree with."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from flowgraph.simulator.engines import ADMIT, Speed


class Asked(NamedTuple):
    """A request that is there from the start."""

    uid: int
    prompt: int
    tokens: int


def step_through(
    asked: list[Asked], slots: int, speed: Speed, kv: float = math.inf
) -> tuple[dict[int, float], int]:
    """When each ends, and how many lost their KV on the way."""
    now, retractions = 0.0, 0
    waiting = deque(range(len(asked)))
    done = [0] * len(asked)
    running: list[int] = []
    ends: dict[int, float] = {}

    def used() -> int:
        prompts = {asked[i].uid: asked[i].prompt for i in running}
        return sum(done[i] for i in running) + sum(prompts.values())

    while waiting or running:
        while waiting and len(running) < slots:
            i = waiting[0]
            shared = any(asked[j].uid == asked[i].uid for j in running)
            context = done[i] + (0 if shared else asked[i].prompt)
            after = used() + context
            if running and (after > ADMIT * kv or after + len(running) + 1 > kv):
                break
            running.append(waiting.popleft())
            now += context / speed.prefill
        if len(running) > 1 and used() + len(running) > kv:
            waiting.appendleft(running.pop())
            retractions += 1
            continue
        n = len(running)
        now += speed.step + speed.per_request * n + speed.per_token * (used() + n / 2)
        for i in list(running):
            done[i] += 1
            if done[i] == asked[i].tokens:
                running.remove(i)
                ends[i] = now
    return ends, retractions
