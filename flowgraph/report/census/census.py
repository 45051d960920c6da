"""census: every state of a plan, with its owner, its bytes, the boundaries it crosses, and what restores it.

How complex a ring is counts here as what has to be kept right: the number of (state, boundary) crossings.
What one firing holds only while it runs is no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from flowgraph.plan.held import HeldKind, held
from flowgraph.plan.plan import Hop, Owner, Plan
from flowgraph.report.census import rows
from flowgraph.spec.form import MANY

# concurrency  firings that run side by side touch it
# process      it is read in another process than its owner's
# crash        it is lost when its owner's process dies, and the ring needs it to go on
# run          it outlives the run
Boundary = Literal["concurrency", "process", "crash", "run"]
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)
ANEW = "a new run, from step 0"


class State(msgspec.Struct, frozen=True):
    """One state. parts: its fields or columns; nbytes: its bound; exact: False when it may hold more than `nbytes`.

    hop: the one that it is of; "" for what the driver or a resource keeps of many
    """

    name: str
    owner: str
    parts: tuple[str, ...]
    nbytes: int
    exact: bool
    crosses: tuple[Boundary, ...]
    restored: str
    hop: str = ""


class Census(msgspec.Struct, frozen=True):
    """complexity: (state, boundary) crossings of all states."""

    graph: str
    states: tuple[State, ...]
    nbytes: int
    exact: bool
    complexity: int


def census(plan: Plan) -> Census:
    """All states of a plan. Imports its folds, to read what their states hold."""
    states = (*_driver(plan), *_blocks(plan), *(s for o in plan.owners.values() for s in _resources(plan, o)))
    return Census(
        plan.graph,
        states,
        sum(s.nbytes for s in states),
        all(s.exact for s in states),
        sum(len(s.crosses) for s in states),
    )


def _driver(plan: Plan) -> Iterator[State]:
    """One thread holds these, so that nothing touches them side by side; only what is under way is."""
    for hop in plan.hops.values():
        if hop.kind == "fold":
            state = rows.fold_state(plan, hop)
            yield State(
                f"fold {hop.name}", hop.owner, state.fields, state.nbytes, state.exact, ("crash",), ANEW,
                hop.name,
            )  # fmt: skip
    yield State(
        "table of rows", "driver", tuple(rows.kinds(plan)), rows.table_bytes(plan), True, ("crash",), ANEW
    )
    yield State("ledger", "driver", ("trajectory",), rows.ledger_bytes(plan), True, ("crash",), ANEW)
    under_way: tuple[Boundary, ...] = ("concurrency", "crash")
    yield State("firings under way", "driver", (), rows.firing_bytes(plan), True, under_way, ANEW)
    for hop in plan.hops.values():
        for output in hop.initial:
            yield _value(plan, hop, output)


def _value(plan: Plan, hop: Hop, output: str) -> State:
    """A value that is kept, as the version is: the driver's, whoever publishes and reads it."""
    readers = [
        h for h in plan.hops.values() for w in h.watches if (w.producer, w.output) == (hop.name, output)
    ]
    apart = any(h.owner != "driver" for h in (hop, *readers))
    crosses: tuple[Boundary, ...] = ("process", "crash") if apart else ("crash",)
    name = f"version of {hop.name}" if output == "out" else f"{output} of {hop.name}"
    return State(name, "driver", (), rows.packed(MANY), True, crosses, f"the next {hop.name}", hop.name)


def _blocks(plan: Plan) -> Iterator[State]:
    """A hop's live blocks. The driver holds every arena, so they outlive a worker that wrote them."""
    for hop in plan.hops.values():
        if not hop.slots:
            continue
        ends = [hop, *(h for h in plan.hops.values() if hop.name in h.takes)]
        found: dict[Boundary, bool] = {
            "concurrency": any(h.concurrent for h in ends),
            "process": any(h.owner != hop.home for h in ends),
            "crash": hop.home == "driver",
        }
        yield State(
            f"blocks of {hop.name}, until {hop.lifetime}",
            hop.home,
            tuple(c.name for c in hop.written),
            hop.slots * hop.block_bytes,
            True,
            tuple(b for b in BOUNDARIES if found.get(b)),
            ANEW if hop.home == "driver" else "the driver holds them",
            hop.name,
        )


def _resources(plan: Plan, owner: Owner) -> Iterator[State]:
    users = [h for h in plan.hops.values() if h.owner == owner.name]
    beside: dict[str, bool] = {
        kind: any(h.concurrent for h in users if h.uses == kind) for kind in ("engine", "learner")
    }
    sync = next((h.name for h in users if h.uses == "engine" and _reads_weights(plan, h)), None)
    prefill = "prefilled again from the prompts"
    kept: dict[HeldKind, tuple[str, tuple[Boundary, ...], str]] = {
        "engine weights": ("engine", ("crash",), f"the next {sync}" if sync else "the model's files"),
        "staged weights": (
            "engine",
            ("process", "crash"),
            f"the next {sync}" if sync else "the model's files",
        ),
        "weights in /dev/shm": ("engine", ("process", "crash"), "made anew for each sync"),
        "KV cache": ("engine", (), prefill),
        "cached prefixes": ("engine", (), prefill),
        "recorded choices": ("engine", (), "recorded anew with their tokens"),
        "learner weights": ("learner", ("crash", "run"), "saved when the run ends; before that, " + ANEW),
        "master weights": ("learner", ("crash",), ANEW),
        "moments": ("learner", ("crash",), ANEW),
    }
    for part in held(plan, owner):
        if part.kind in kept:
            uses, crosses, restored = kept[part.kind]
            if beside[uses]:
                crosses = ("concurrency", *crosses)
            yield State(
                part.kind, owner.name, (), part.nbytes or 0, part.nbytes is not None, crosses, restored
            )


def _reads_weights(plan: Plan, hop: Hop) -> bool:
    return any(plan.hops[r.producer].column(r.column).kind == "tensors" for r in hop.reads)


def to_json(found: Census) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1)
