"""The ledger of trajectories: who moved one where it can't go is named."""

from __future__ import annotations

import re

import pytest

from flowgraph.errors import LedgerError
from flowgraph.runtime.ledger import Ledger


@pytest.fixture
def ledger() -> Ledger:
    """Trajectory 3 is in flight, 4 is ready, 5 is consumed."""
    made = Ledger()
    for key in (3, 4, 5):
        made.register(key, "dispatch")
    for key in (4, 5):
        made.move(key, "ready", "buffer")
    made.move(5, "consumed", "batch")
    made.check()
    return made


def test_what_is_dispatched_twice_names_its_dispatcher(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="hop dispatch dispatched trajectory 3 twice"):
        ledger.register(3, "dispatch")


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
    ledger: Ledger, key: int, to: str, message: str, help: str
) -> None:
    with pytest.raises(LedgerError, match=f"{re.escape(message)}\n  help: let batch .* {help}$"):
        ledger.move(key, to, "batch")  # type: ignore[arg-type]
    ledger.check()
