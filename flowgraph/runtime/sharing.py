"""A step shared out to the processes of a learner's owner: who takes which trajectories.

Trajectories and groups lie in blocks of their own, and a process is sent the blocks of its own. Of a column that a hop
made of the whole step, it reads the ranges of its trajectories (`pieces.py`); so what a hop sees is a smaller step,
whole in itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from flowgraph.errors import RunError
from flowgraph.learners.partition import Work, cost, partition, split_steps, work
from flowgraph.models import facts
from flowgraph.plan.plan import Hop, Plan
from flowgraph.runtime.messages import Block, Fire, Share
from flowgraph.spec.types import Row


def fires(plan: Plan, hop: Hop, rows: Sequence[Row], fire: Fire) -> tuple[Fire, ...]:
    """A firing on a step as each process of the hop's owner is sent it. Only the first places blocks and frees them.

    rows: the trajectories of the step, in its order
    """
    if plan.processes(hop) == 1:
        return (fire,)
    return tuple(
        msgspec.structs.replace(
            fire,
            blocks=blocks_of(plan, share, fire.blocks),
            leaves=[fire.leaves[i] for i in share.members],
            over={} if rank else fire.over,
            share=share,
        )
        for rank, share in enumerate(share_out(plan, hop.owner, rows))
    )


def share_out(plan: Plan, owner: str, rows: Sequence[Row]) -> list[Share]:
    """Every process's part of a step, so that the dearest is as cheap as can be; each trajectory is in exactly one.

    rows: the trajectories of the step, in its order
    Raises RunError when there are fewer of them than processes.
    """
    processes = plan.owners[owner].processes
    if len(rows) < processes:
        raise RunError(
            f"a step of {len(rows)} trajectories can't be shared out to the {processes} processes of owner {owner}",
            f"give {owner} fewer processes, or every step more trajectories",
        )
    known = [name for name in rows[0].dims if all(name in row.dims for row in rows)]
    sizes = {"trajectory": [1] * len(rows), **{name: [row.dims[name] for row in rows] for name in known}}
    return [Share(members.tolist(), sizes) for members in _parts(plan, owner, rows, processes)]


def _parts(plan: Plan, owner: str, rows: Sequence[Row], processes: int) -> list[npt.NDArray[np.int64]]:
    """By what training on each takes, each minibatch by itself.

    Leaves are taken as of equal length: only their sum is known here.
    """
    learner = plan.owners[owner].learner
    assert learner is not None, "only a learner's work is shared"
    linear, quadratic = _work(learner.model)
    tokens = np.array([row.dims.get("token", 1) for row in rows], np.float64)
    leaves = np.array([max(1, row.dims.get("leaf", 1)) for row in rows], np.float64)
    costs = cost(tokens, linear, 0.0) + cost(tokens / leaves, 0.0, quadratic) * leaves
    steps = max(hop.config.get("minibatches", 1) for hop in plan.hops.values() if hop.owner == owner)
    group = shared = None
    if learner.pack == "tree":
        prompts = np.array([row.parents[0].dims.get("prompt", 0) for row in rows], np.float64)
        group = [row.parents[0].key for row in rows]
        shared = np.minimum(costs, cost(prompts, linear, quadratic))
    found = split_steps(costs, processes, min(steps, len(rows)), group=group, shared=shared)
    return found if all(map(len, found)) else partition(costs, processes)


@functools.cache
def _work(model: str) -> Work:
    found = facts(model)
    return Work(1.0, 0.0) if found is None else work(found)


def blocks_of(plan: Plan, share: Share, blocks: Mapping[str, list[Block]]) -> dict[str, list[Block]]:
    """Hop → the blocks that a process reads: of rows below the step those of its own trajectories."""
    return {
        name: found if plan.hops[name].rows == "step" else [found[i] for i in share.members]
        for name, found in blocks.items()
    }
