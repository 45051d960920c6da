"""Batch: which of the ready trajectories the next step trains on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float32, Int32, Int64

from flowgraph import Array, Dim, Dropped, Event, Latest, Row, Rows, Seam, fold


class Counter(msgspec.Struct):
    """dead: uid of a dropped group → how many of its members are yet to come

    equal: groups dropped for equal scores since the last batch
    """

    batch_id: int = 0
    equal: int = 0
    dead: dict[int, int] = {}


class Step(NamedTuple):
    """One batch. lag: versions between each trajectory's tag and this batch."""

    parents: tuple[Row, ...]
    batch_id: Int64[Array, ""]
    lag: Int32[Array, "trajectory"]


class Chosen(NamedTuple):
    leaves: Annotated[list[Step], Rows("step")]
    dropped: Annotated[list[Dropped], Event()]


def _validate(*, drop_equal: bool = False, patience: int = 20) -> None:
    if patience < 1:
        raise ValueError(f"patience must be at least 1, not {patience}")


@fold(lifetime="step", collect=("trajectory", "step"), needs={"drop_equal": "score"}, validate=_validate)
def oldest_first(
    state: Counter,
    ready: Annotated[tuple[Row, ...], Rows("trajectory"), Latest()],
    score: Mapping[int, Float32[Array, "leaf"]] | None = None,
    *,
    groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    max_lag: Annotated[int, Seam("version", "max_lag")],
    drop_equal: bool = False,
    patience: int = 20,
) -> Chosen:
    """Take `groups` whole groups, oldest first, as soon as they are there.

    A trajectory's lag is batch_id − its tag; a group is as old as its oldest member, ties go by arrival of its last.
    A group with a member beyond `max_lag` is dropped whole (reason "stale"), because a baseline over the rest
    would be biased; members that come later are dropped as they come. Rows are laid out in order of dispatch, so a
    batch does not depend on who finished first.

    drop_equal: whole groups of which all scores are equal are dropped too (reason "equal scores"): relative to each
    other they teach nothing. More are sampled in their place, until a batch is full of groups that do (DAPO's dynamic
    sampling, arXiv 2503.14476). It wants the reward before the buffer: score, by row key, of every ready row.
    patience: batches' worth of groups that may be dropped so before a batch is made; after that it raises ValueError,
    because a task that the model always or never solves would be sampled for ever.
    """
    members: dict[int, list[Row]] = {}
    for row in ready:
        members.setdefault(row.uid, []).append(row)
    lag = {row.key: state.batch_id - row.tag for row in ready}
    stale = [
        uid
        for uid, rows in members.items()
        if uid in state.dead or max(lag[row.key] for row in rows) > max_lag
    ]
    dropped = []
    for uid in stale:
        rows = members.pop(uid)
        dropped += [Dropped(row, "stale") for row in rows]
        state.dead[uid] = state.dead.get(uid, samples) - len(rows)
        if not state.dead[uid]:
            del state.dead[uid]
    arrival = {row.key: i for i, row in enumerate(ready)}
    whole = [rows for rows in members.values() if len(rows) == samples]
    if drop_equal:
        assert score is not None, "needs= says so, and the check sees to it"
        equal = [rows for rows in whole if _equal(np.concatenate([score[row.key] for row in rows]))]
        dropped += [Dropped(row, "equal scores") for rows in equal for row in rows]
        whole = [rows for rows in whole if rows not in equal]
        state.equal += len(equal)
        if state.equal >= patience * groups and len(whole) < groups:
            what = f"{state.equal} groups in a row have equal scores, so there is nothing to learn from them"
            raise ValueError(
                f"{what}; choose another task or reward, raise patience, or set drop_equal: false"
            )
    whole.sort(key=lambda rows: (min(row.tag for row in rows), max(arrival[row.key] for row in rows)))
    if len(whole) < groups:
        return Chosen([], dropped)
    rows = sorted((row for one in whole[:groups] for row in one), key=lambda row: row.key)
    step = Step(
        parents=tuple(rows),
        batch_id=np.array(state.batch_id, np.int64),
        lag=np.array([lag[row.key] for row in rows], np.int32),
    )
    state.batch_id += 1
    state.equal = 0
    return Chosen([step], dropped)


def _equal(score: Float32[Array, "leaf"]) -> bool:
    """Whether scores differ by rounding at most, as `hops.advantage.grpo` sees it."""
    return bool(score.max() - score.min() <= 1e-6 * float(np.abs(score).max()))
