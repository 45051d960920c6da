"""Batch: which of the ready trajectories the next step trains on."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from flowgraph import Array, Credit, Dim, Dropped, Event, Latest, Row, Rows, Seam, Short, fold
from hops import candidates
from hops.candidates import Candidates, Unit, alike, arrive, expiring, in_time, kill, older, take

Groups = Literal["whole", "partial"]
Scores = Mapping[int, Float32[Array, "leaf"]]
Known = Mapping[int, Bool[Array, "leaf"]]


class Step(NamedTuple):
    """One batch. lag: versions between each trajectory's tag and this batch."""

    parents: tuple[Row, ...]
    batch_id: Int64[Array, ""]
    lag: Int32[Array, "trajectory"]


class Chosen(NamedTuple):
    """short: the number, from 1, of the batch for which trajectories are missing; 0 while none are

    expiring: trajectories that were too old for another batch, and not in it, when the last batch was made
    """

    leaves: Annotated[list[Step], Rows("step")]
    dropped: Annotated[list[Dropped], Event()]
    short: Annotated[Short, Latest()]
    expiring: Annotated[int, Latest()]


def _validate(
    *,
    groups: Groups = "whole",
    stale: Literal["drop", "wait"] = "drop",
    drop_equal: bool = False,
    patience: int = 20,
) -> None:
    if patience < 1:
        raise ValueError(f"patience must be at least 1, not {patience}")
    if drop_equal and groups == "partial":
        raise ValueError(
            "drop_equal compares the scores of whole groups, so it can't be with groups: partial"
        )


@fold(
    lifetime="step",
    collect=("trajectory", "step"),
    needs={"drop_equal": "score", "stale=wait": "sent"},
    validate=_validate,
)
def oldest_first(
    state: Candidates,
    ready: Annotated[Row | None, Rows("trajectory")],
    sent: Annotated[Row | None, Rows("trajectory"), Event()] = None,
    score: Scores | None = None,
    scored: Known | None = None,
    *,
    n_groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    max_lag: Annotated[int, Seam("version", "max_lag")],
    credit: Annotated[int, Credit()],
    groups: Groups = "whole",
    stale: Literal["drop", "wait"] = "drop",
    drop_equal: bool = False,
    patience: int = 20,
) -> Chosen:
    """Take B = n_groups·samples trajectories, oldest first, as soon as they are there and training has room.

    A trajectory's lag is batch_id − its tag, tested when the batch is made: what dispatch admits bounds how many there
    are, not how late one of them comes. Rows are laid out in order of dispatch, so a batch does not depend on who
    finished first. A trajectory that came to nothing is dropped for its own reason, and its group with it.

    sent: trajectories as they are dispatched, so that it is known which are in flight
    groups: whole, the baseline of each group is over all its samples. partial: trajectories are taken one by one, and a
        baseline is over those of a group that happen to be in one batch: less waiting, more noise, and a bias towards
        what finishes early.
    stale: what becomes of a trajectory beyond `max_lag`. drop: it is dropped (reason "stale"), with its whole group,
        because a baseline over the rest would be biased; prompts that are slow to answer are trained less often. wait:
        no batch is made after which those that are ready or in flight could not all be trained in time, so none is
        dropped as stale and no kind of prompt is starved; a straggler holds training up, as long as the rollout's time
        limit lets it. See also `withhold`.
    drop_equal: whole groups of which all scores are equal are dropped too (reason "equal scores"): relative to each
        other they teach nothing. More are sampled in their place, until a batch is full of groups that do (DAPO's
        dynamic sampling, arXiv 2503.14476). It wants the reward before the buffer: score, of the row that came, and
        scored where some have none.
    patience: batches' worth that may be dropped before a batch is made; after that it raises ValueError, because a task
        that the model always or never solves would be sampled for ever.
    """
    size, wanted = (samples, n_groups) if groups == "whole" else (1, n_groups * samples)
    dropped = _heard(state, ready, sent, score if drop_equal else None, scored, size)
    for unit in older(state, state.batch_id - max_lag):
        dropped += kill(state, unit, size, "stale")
    if drop_equal and ready is not None and _equal(state, ready, size):
        dropped += kill(state, _unit(ready, size), size, "equal scores")
    if state.lost and state.wholes < wanted:
        _lose_patience(state, patience * wanted, "groups" if groups == "whole" else "trajectories")
    if not credit or state.wholes < wanted or (stale == "wait" and not in_time(state, wanted, max_lag)):
        missing = Short(state.batch_id + 1 if credit and state.wholes < wanted else 0)
        return Chosen([], dropped, missing, state.expiring)
    batch_id = state.batch_id
    rows = [row for unit in take(state, wanted, size) for row in unit.rows]
    state.expiring = expiring(state, state.batch_id - max_lag)
    return Chosen([_step(batch_id, rows)], dropped, Short(0), state.expiring)


class Withholding(NamedTuple):
    """One batch without its stale members. withheld_score, withheld_uid: theirs, which still shape the baseline"""

    parents: tuple[Row, ...]
    batch_id: Int64[Array, ""]
    lag: Int32[Array, "trajectory"]
    withheld_score: Float32[Array, "withheld"]
    withheld_uid: Int64[Array, "withheld"]


class ChosenWithholding(NamedTuple):
    """short, expiring: as `Chosen`"""

    leaves: Annotated[list[Withholding], Rows("step")]
    dropped: Annotated[list[Dropped], Event()]
    short: Annotated[Short, Latest()]
    expiring: Annotated[int, Latest()]


def _validate_withhold(*, patience: int = 20) -> None:
    _validate(patience=patience)


@fold(
    lifetime="step",
    collect=("trajectory", "step"),
    read=("withheld_score", "withheld_uid"),
    validate=_validate_withhold,
)
def withhold(
    state: Candidates,
    ready: Annotated[Row | None, Rows("trajectory")],
    score: Scores,
    sent: Annotated[Row | None, Rows("trajectory"), Event()] = None,
    scored: Known | None = None,
    *,
    n_groups: Annotated[int, Dim("group")],
    samples: Annotated[int, Dim("sample")],
    max_lag: Annotated[int, Seam("version", "max_lag")],
    credit: Annotated[int, Credit()],
    patience: int = 20,
) -> ChosenWithholding:
    """`oldest_first`, but a stale member does not take its group with it: its tokens are not trained (it is dropped,
    reason "withheld"), and its score still counts in its group's baseline, which stays one over the whole group.

    A batch has then fewer trajectories than B. A group of which every member is stale is dropped. The advantage reads
    withheld_score and withheld_uid; `dims.withheld` bounds how many there are in a batch, which is less than B.
    """
    dropped = _heard(state, ready, sent, score, scored, samples)
    batch_id = state.batch_id
    if credit and state.wholes >= n_groups:
        stale = [unit for unit, at in state.units.items() if _is_stale(at, samples, batch_id - max_lag)]
        dropped += [one for unit in stale for one in kill(state, unit, samples, "stale")]
    if state.lost and state.wholes < n_groups:
        _lose_patience(state, patience * n_groups, "groups")
    if not credit or state.wholes < n_groups:
        missing = Short(state.batch_id + 1 if credit and state.wholes < n_groups else 0)
        return ChosenWithholding([], dropped, missing, state.expiring)
    for _ in older(state, batch_id - max_lag):
        pass  # a member that is too old does not end its group
    units = take(state, n_groups, samples)
    fresh = [row for unit in units for row in unit.rows if batch_id - row.tag <= max_lag]
    late = [(unit, row) for unit in units for row in unit.rows if batch_id - row.tag > max_lag]
    known = [(row.uid, unit.scores[row.key][0]) for unit, row in late if row.key in unit.scores]
    step = Withholding(
        *_step(batch_id, fresh),
        withheld_score=np.array([score for _, score in known], np.float32),
        withheld_uid=np.array([uid for uid, _ in known], np.int64),
    )
    dropped += [Dropped(row, "withheld") for _, row in late]
    state.expiring = expiring(state, state.batch_id - max_lag)
    return ChosenWithholding([step], dropped, Short(0), state.expiring)


# --- parts ---------------------------------------------------------------------------------------------------------


def _heard(
    state: Candidates,
    ready: Row | None,
    out: Row | None,
    score: Scores | None,
    scored: Known | None,
    size: int,
) -> list[Dropped]:
    """Keep count of what was sent and what came; what is dropped for what came."""
    if out is not None:
        candidates.sent(state, out, _unit(out, size))
    if ready is None:
        return []
    if score is None or ready.key not in score:
        return arrive(state, ready, ready.key if size == 1 else ready.parents[0].key, size)
    scores = score[ready.key] if scored is None else score[ready.key][scored[ready.key]]
    return arrive(state, ready, _unit(ready, size), size, scores.tolist())


def _unit(row: Row, size: int) -> int:
    """The unit of a trajectory: its group, or itself where it is alone."""
    return row.key if size == 1 else row.uid


def _step(batch_id: int, rows: list[Row]) -> Step:
    rows.sort(key=attrgetter("key"))
    lag = np.array([batch_id - row.tag for row in rows], np.int32)
    return Step(tuple(rows), np.array(batch_id, np.int64), lag)


def _equal(state: Candidates, row: Row, size: int) -> bool:
    """Whether a row completes a group of equal scores. One without any score is no better."""
    unit = state.units.get(_unit(row, size))
    if unit is None or len(unit.rows) < size:
        return False
    scores = [score for one in unit.scores.values() for score in one]
    return not scores or alike(scores)


def _lose_patience(state: Candidates, most: int, what: str) -> None:
    """Raises ValueError when so many were dropped since the last batch that another would not help."""
    n = sum(state.lost.values())
    if n < most:
        return
    why = ", ".join(f"{reason}: {n}" for reason, n in state.lost.items())
    help = "see the log of the rollout's owner, or raise its time limit"
    if "stale" in state.lost:
        help = "raise max_lag or patience, or set stale: wait"
    if "equal scores" in state.lost:
        help = "choose another task or reward, raise patience, or set drop_equal: false"
    raise ValueError(f"{n} {what} in a row were dropped, and no batch was made ({why}); {help}")


def _is_stale(unit: Unit, size: int, oldest: int) -> bool:
    """Whether a unit is whole, and every member of it is of a tag below `oldest`."""
    return len(unit.rows) == size and all(row.tag < oldest for row in unit.rows)
