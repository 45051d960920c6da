"""The ledger of trajectories: who moved one where it can't go is named."""

from __future__ import annotations

import re

import pytest

from flowgraph.errors import LedgerError
from flowgraph.runtime.ledger import Ledger
from flowgraph.runtime.rows import Record, Stage
from flowgraph.spec.types import Row


@pytest.fixture
def records() -> dict[int, Record]:
    return {key: Record(Row("trajectory", key), "dispatch", Stage(frozenset()), ()) for key in (3, 4, 5)}


@pytest.fixture
def ledger(records: dict[int, Record]) -> Ledger:
    """Trajectory 3 is in flight, 4 is ready, 5 is consumed."""
    made = Ledger()
    for record in records.values():
        made.register(record)
    for key in (4, 5):
        made.move(records[key], key, "ready", "buffer")
    made.move(records[5], 5, "consumed", "batch")
    made.check(records.values())
    return made


def test_a_count_that_is_not_what_the_records_say_is_a_fault(
    ledger: Ledger, records: dict[int, Record]
) -> None:
    records[3].place = "ready"
    with pytest.raises(LedgerError, match=r"dispatched 3 is not in flight 1 \+ ready 1 \+ consumed 1"):
        ledger.check(records.values())


@pytest.mark.parametrize(
    ("key", "to", "message", "help"),
    [
        (3, "consumed", "hop batch can't choose trajectory 3: it is in flight", "only one that is ready"),
        (4, "ready", "hop batch can't take trajectory 4: it is ready", "only one that is in flight"),
        (
            5,
            "dropped",
            "hop batch can't drop trajectory 5: it was consumed or dropped before",
            "in flight or ready",
        ),
    ],
)
def test_a_move_that_can_not_be_names_the_hop_and_what_it_may_move(
    ledger: Ledger, records: dict[int, Record], key: int, to: str, message: str, help: str
) -> None:
    with pytest.raises(LedgerError, match=f"{re.escape(message)}\n  help: let batch .* {help}$"):
        ledger.move(records[key], key, to, "batch")  # type: ignore[arg-type]
    ledger.check(records.values())


def test_a_trajectory_that_nobody_knows_can_not_be_moved(ledger: Ledger) -> None:
    with pytest.raises(
        LedgerError, match="hop batch can't drop trajectory 9: it was consumed or dropped before"
    ):
        ledger.move(None, 9, "dropped", "batch")
