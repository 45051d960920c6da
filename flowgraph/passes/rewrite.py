"""rewrite: the table of passes, in the order in which they run. None changes a bit that any hop reads.

    project   a column that nobody reads is not written
    fold      one value a row, spread over its tokens, crosses as that value
    encode    masks are bits, shared prefixes are there once, what can be derived does not cross
    narrow    integers below a bound are stored in the smallest dtype that holds them
    place     hops that nobody placed move to their readers; a process maps only the memory that it reads
    defer     payload goes from writer to reader; only descriptors pass through the driver
    fuse      hops of one owner that follow each other on the same rows fire as one, without a seam

`place` comes before `fuse`, which asks whose each hop is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from flowgraph.ir.graph import Graph
from flowgraph.passes.defer import defer
from flowgraph.passes.encode import encode
from flowgraph.passes.fold import fold
from flowgraph.passes.fuse import fuse
from flowgraph.passes.narrow import narrow
from flowgraph.passes.place import place
from flowgraph.passes.project import project
from flowgraph.passes.verify import verify

Pass = Callable[[Graph], Graph]
PASSES: dict[str, Pass] = {p.__name__: p for p in (project, fold, encode, narrow, place, defer, fuse)}
SOURCE = "source"


def stages(graph: Graph, off: Collection[str] = ()) -> Iterator[tuple[str, Graph]]:
    """("source", the graph as written), then the graph after each pass that is on, verified."""
    yield SOURCE, graph
    for name, one in PASSES.items():
        if name not in off:
            after = one(graph)
            verify(name, graph, after)
            graph = after
            yield name, graph


def rewrite(graph: Graph, off: Collection[str] = ()) -> Graph:
    """The graph after every pass that is on. off: names in PASSES."""
    for _, after in stages(graph, off):
        graph = after
    return graph
