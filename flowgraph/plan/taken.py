"""Which columns' bytes a port takes, so that the price, the prediction and the measure count each of them once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowgraph.plan.plan import Read


def takes(reads: Sequence[Read]) -> dict[str, list[Read]]:
    """Port → the columns whose bytes count as its own: that which it is bound to, where it crosses, and what its form
    takes besides. A column that several take counts for the first port that is bound to it, else for the first of all.
    """
    bound = {(r.producer, r.column): r.port for r in reversed(reads) if r.crosses}
    out: dict[str, list[Read]] = {}
    for one in reads:
        found = [n for n in (one, *_needs(one)) if n.crosses]
        first = {(n.producer, n.column): n for n in reversed(found)}
        out[one.port] = [n for key, n in first.items() if bound.setdefault(key, one.port) == one.port]
    return out


def _needs(one: Read) -> Iterator[Read]:
    for need in one.needs:
        yield need
        yield from _needs(need)
