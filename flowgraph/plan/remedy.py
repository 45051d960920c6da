"""What would bring a plan under a budget that it breaks: found by compiling with it, and not guessed.

Tried in this order, the first kind that has an answer wins: passes that were left out, another owner for a hop that
somebody placed, a smaller dim, fewer slots of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from flowgraph.ir.graph import Graph, Owner
from flowgraph.passes.check import check
from flowgraph.passes.rewrite import PASSES, rewrite
from flowgraph.plan.bill import NOBODY
from flowgraph.plan.lower import lower
from flowgraph.plan.plan import Plan
from flowgraph.spec.dims import Size
from flowgraph.spec.units import size_text

Price = Callable[[Plan], float]  # what a budget is of: a step's mean, or the bound of what is held


def remedy(graph: Graph, off: Collection[str], price: Price, budget: float, part: str) -> str | None:
    """One thing to do, as text; None when nothing here is enough.

    graph: as written, without findings; off: the passes that are left out; part: the largest of what is too much
    """
    if names := passes_on(graph, off, price, budget):
        return f"leave {' and '.join(names)} on"
    if moves := list(_moves(graph, off, price, budget, part)):
        return " or ".join(moves)
    if sizes := [*_dims(graph, off, price, budget), *_slots(graph, off, price, budget)]:
        return " or ".join(f"--set {one}" for one in sizes)
    if sizes := _together(graph, off, price, budget):
        return " ".join(f"--set {one}" for one in sizes)
    return None


def passes_on(graph: Graph, off: Collection[str], price: Price, budget: float) -> list[str]:
    """The fewest of the passes that are left out which must be on; [] when all of them are not enough."""

    def fits(out: Collection[str]) -> bool:
        return price(_plan(graph, out)) <= budget

    found = [name for name in PASSES if name in off]
    for name in found:
        if fits(set(off) - {name}):
            return [name]
    if not found or not fits(()):
        return []
    for name in list(found):
        rest = [one for one in found if one != name]
        found = rest if fits(set(off) - set(rest)) else found
    return found


# --- options of the graph --------------------------------------------------------------------------------------


def _moves(graph: Graph, off: Collection[str], price: Price, budget: float, part: str) -> Iterator[str]:
    """Owners for the hops at the ends of the largest seam, where the file names one and no resource ties them to it."""
    ends = part.removesuffix(NOBODY).split(" → ")
    for name in ends:
        node, decl = graph.nodes.get(name), graph.file.hops.get(name)
        if node is None or decl is None or not decl.owner or node.spec.facts.kind != "hop":
            continue
        for owner in graph.owners:
            changed = graph.with_nodes({name: msgspec.structs.replace(node, owner=owner)})
            if owner != node.owner and _sound(changed) and price(_plan(changed, off)) <= budget:
                yield f"--set hops.{name}.owner={owner}"


def _dims(graph: Graph, off: Collection[str], price: Price, budget: float) -> Iterator[str]:
    """The largest value of each dim that is enough by itself: its mean, or its bound, or both where they are one."""
    for name, size in graph.file.dims.items():

        def mean(value: int, name: str = name, size: Size = size) -> Graph:
            return with_dims(graph, {name: Size(value, size.max)})

        def bound(value: int, name: str = name, size: Size = size) -> Graph:
            return with_dims(graph, {name: Size(min(size.mean, value), value)})

        if size.mean < size.max and (n := _largest(mean, math.ceil(size.mean) - 1, off, price, budget)):
            yield f"dims.{name}.mean={n}"
        elif n := _largest(bound, size.max - 1, off, price, budget):
            yield f"dims.{name}{'.max' if size.mean <= n and size.mean < size.max else ''}={n}"


def _together(graph: Graph, off: Collection[str], price: Price, budget: float) -> list[str]:
    """Several dims, when one is not enough: each that costs something is 1, and the last as large as it may be."""
    said: list[str] = []
    for name, size in graph.file.dims.items():
        less = with_dims(graph, {name: Size(1, 1)})
        if price(_plan(less, off)) == price(_plan(graph, off)):
            continue

        def bound(value: int, name: str = name, size: Size = size, graph: Graph = graph) -> Graph:
            return with_dims(graph, {name: Size(min(size.mean, value), value)})

        if n := _largest(bound, size.max - 1, off, price, budget):
            return [*said, f"dims.{name}={n}"]
        said, graph = [*said, f"dims.{name}=1"], less
    return []


def _slots(graph: Graph, off: Collection[str], price: Price, budget: float) -> Iterator[str]:
    for name, owner in graph.owners.items():
        if owner.engine is None:
            continue

        def fewer(value: int, name: str = name, owner: Owner = owner) -> Graph:
            assert owner.engine is not None
            engine = msgspec.structs.replace(owner.engine, slots=value)
            owners = {**graph.owners, name: msgspec.structs.replace(owner, engine=engine)}
            return msgspec.structs.replace(graph, owners=owners)

        if n := _largest(fewer, owner.engine.slots - 1, off, price, budget):
            yield f"owners.{name}.engine.slots={n}"


def _largest(
    make: Callable[[int], Graph], most: int, off: Collection[str], price: Price, budget: float
) -> int:
    """The largest value whose graph is within the budget and without findings; 0 when there is none."""
    found = largest(lambda value: price(_plan(make(value), off)), budget, most)
    return found if found and _sound(make(found)) else 0


def largest(cost: Callable[[int], float], budget: float, most: int) -> int:
    """The largest value in [1, most] that costs no more than the budget; 0 when 1 does. What is larger costs no less.

    Nearly every cost is a straight line, so the next value to try is read off one, in turn with the middle.
    """
    if most < 1 or (low_cost := cost(1)) > budget:
        return 0
    if (high_cost := cost(most)) <= budget:
        return most
    low, high, middle = 1, most, False
    while high - low > 1:
        part = 0.5 if middle else (budget - low_cost) / (high_cost - low_cost)
        at = min(high - 1, max(low + 1, low + int(part * (high - low))))
        if (now := cost(at)) <= budget:
            low, low_cost = at, now
        else:
            high, high_cost = at, now
        middle = not middle
    return low


def with_dims(graph: Graph, dims: Mapping[str, Size]) -> Graph:
    """The graph with some dims of its file replaced."""
    file = msgspec.structs.replace(graph.file, dims={**graph.file.dims, **dims})
    return msgspec.structs.replace(graph, file=file)


def floor(graph: Graph, price: Price) -> str:
    """What it costs with every pass on and every dim at 1."""
    least = with_dims(graph, {name: Size(1, 1) for name in graph.file.dims})
    return size_text(price(_plan(least, ())))


def _sound(graph: Graph) -> bool:
    """Whether it has no findings but those of budgets that can't be, which are there already."""
    return all(d.code == "FG503" for d in check(graph))


def _plan(graph: Graph, off: Collection[str]) -> Plan:
    return lower(rewrite(graph, off))
