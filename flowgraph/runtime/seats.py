"""The workers of a run: one an owner, and more where processes share a learner's work."""

from __future__ import annotations

from typing import NamedTuple

from flowgraph.plan.plan import Plan


class Seat(NamedTuple):
    """One worker: the owner whose hops it runs, and which of that owner's processes it is."""

    owner: str
    rank: int = 0

    @property
    def name(self) -> str:
        """Under which it is sent messages: its owner's, with the rank behind it where it is not the first."""
        return f"{self.owner}.{self.rank}" if self.rank else self.owner

    @property
    def said(self) -> str:
        """`owner trainer`, `owner trainer, rank 1`"""
        return f"owner {self.owner}" + (f", rank {self.rank}" if self.rank else "")


def seats(plan: Plan) -> dict[str, Seat]:
    """Every worker of a run by its name: one an owner but for the driver, and more where processes share its work."""
    found = [
        Seat(name, rank) for name, o in plan.owners.items() if name != "driver" for rank in range(o.processes)
    ]
    return {seat.name: seat for seat in found}


def maps(plan: Plan, seat: Seat) -> list[str]:
    """The memories that a worker reads or writes: those of its owner, and of all but the first of several processes
    their own, which the first reads too.
    """
    count = plan.owners[seat.owner].processes
    ranks = [seat.rank] if seat.rank else range(1, count)
    return [*plan.owners[seat.owner].maps, *(Seat(seat.owner, rank).name for rank in ranks)]


def of_owner(plan: Plan, owner: str) -> list[str]:
    """The names of an owner's workers, by rank."""
    return [seat.name for seat in seats(plan).values() if seat.owner == owner]
