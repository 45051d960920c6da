"""A hypothesis strategy that draws whole rings: hops, dtypes, promises, owners, and what each reads by way of whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from flowgraph import Below, Derivable, LastToken, Shared, TiledOver
from flowgraph.spec.dims import Size
from flowgraph.spec.types import INTEGERS, Fact, Lifetime
from tests.graphs.content import DERIVED, MASK, Col
from tests.graphs.rings import Made, Ring, Take

Draw = Callable[[Any], Any]
FLOATS = ("float16", "float32", "float64", "bfloat16")
DTYPES = ("bool", "bool", "bool", *INTEGERS, *FLOATS)
OWNERS = ("driver", "rollout", "trainer", "third", None)
KINDS = ("group", "trajectory", "step")
REQUEST = tuple(
    Col(name, "array", "", dtype)
    for name, dtype in (("uid", "int64"), ("sample", "int32"), ("trajectory", "int64"), ("key", "uint64"))
)
STEP = (Col("batch_id", "array", "", "int64"), Col("lag", "array", "trajectory", "int32"))
KEY = REQUEST[-1]


class Known(NamedTuple):
    """A hop so far: its rows, what can be read by way of it (column → the hop that gives it), and who is before it.

    rare: whether it misses some steps
    """

    rows: str
    visible: dict[Col, str]
    before: frozenset[str]
    rare: bool


@st.composite
def rings(draw: Draw, full: bool = False, max_lag: int = 0, hops: int = 8) -> Ring:
    """full: every dim has one size, which the data fills. hops: at most so many before the buffer, and on steps."""
    ring = _Drawing(draw, full)
    ring.hop("dataset", "group", role="source")
    for i in range(draw(st.integers(0, 1))):
        ring.hop(f"g{i}", "group")
    ring.know("dispatch", "trajectory", REQUEST, list(ring.known)[-1:])
    ring.hop("sampler", "trajectory", role="sampler")
    after = [ring.hop(f"t{i}", "trajectory") for i in range(draw(st.integers(0, hops)))]
    tail = draw(st.sampled_from(["sampler", *after]))
    ring.know("batch", "step", STEP, [tail])
    for i in range(draw(st.integers(0, hops))):
        ring.hop(f"s{i}", "step")
    ring.hop("train", "step", role="train")
    ring.hop("final", "step", role="final")
    ring.hop("sync", "step", role="sync")
    return Ring(ring.dims, ring.with_lifetimes(), tail, full, max_lag)


def _dims(draw: Draw, full: bool) -> dict[str, Size]:
    bounds = {"group": (1, 2), "sample": (1, 3), "leaf": (1, 4), "prompt": (1, 8), "response": (1, 9)}
    most = {name: draw(st.integers(*at)) for name, at in bounds.items()}
    whole = ("group", "sample")
    means = {n: m if full or n in whole else draw(st.floats(max(1, m / 2), m)) for n, m in most.items()}
    sizes = {name: Size(means[name], most[name]) for name in most}
    return {**sizes, "vocab": Size(300, 300)} if draw(st.booleans()) else sizes


class _Drawing:
    """The ring as far as it is drawn. known: hop → what can be read by way of it, in file order."""

    def __init__(self, draw: Draw, full: bool) -> None:
        self.draw, self.full = draw, full
        self.dims = _dims(draw, full)
        self.owners = draw(st.lists(st.sampled_from(OWNERS), min_size=1, max_size=4))
        self.known: dict[str, Known] = {}
        self.hops: list[Made] = []

    def know(self, name: str, rows: str, gives: Sequence[Col], after: Sequence[str], every: int = 1) -> None:
        """Note what later hops can read by way of this one. after: the hops that it reads by way of."""
        rare = every > 1 or any(self.known[one].rare for one in after)
        before = frozenset(after).union(*(self.known[one].before for one in after))
        visible = {c: writer for one in after for c, writer in self.known[one].visible.items()}
        self.known[name] = Known(rows, visible | dict.fromkeys(gives, name), before, rare)

    def hop(self, name: str, rows: str, role: str = "hop") -> str:
        draw = self.draw
        takes = () if role == "source" else self._takes(rows, role)
        every = draw(st.sampled_from([1, 1, 1, 2])) if (rows, role) == ("step", "hop") else 1
        dims = self._dims_of(rows, role, takes)
        gives = () if role in ("sync", "final") else self._gives(name, rows, role, takes, dims)
        owner = None if role == "source" else draw(st.sampled_from(self.owners))
        concurrent = role not in ("source", "sync") and draw(st.sampled_from([False] * 3 + [True]))
        self.hops.append(Made(name, rows, takes, gives, owner, "firing", concurrent, every, role))
        self.know(name, rows, gives, list(dict.fromkeys(t.via for t in takes)), every)
        return name

    # --- what it reads ----------------------------------------------------------------------------------------

    def _takes(self, rows: str, role: str) -> tuple[Take, ...]:
        """At least one column by way of a hop on the same rows, so that the hop works on them too."""
        draw = self.draw
        ways = [one for one, at in self.known.items() if KINDS.index(at.rows) <= KINDS.index(rows)]
        if role in ("train", "sync"):  # a version that comes late would be waited for
            ways = [one for one in ways if not self.known[one].rare]
        same = [one for one in ways if self.known[one].rows == rows and self._readable(one, rows)]
        takes: list[Take] = []
        if role == "sampler":
            takes.append(Take("key", "dispatch", KEY, ""))
        elif role in ("train", "sync"):
            via = "batch" if role == "train" else draw(st.sampled_from(["train", "batch"]))
            via = via if STEP[0] in self.known[via].visible else "batch"
            takes.append(Take("batch_id", via, STEP[0], ""))
        least, most = {"final": (4, 12), "sync": (0, 2), "train": (1, 6)}.get(role, (1, 5))
        for _ in range(draw(st.integers(least, most))):
            via = draw(st.sampled_from(same if not takes else [w for w in ways if self._readable(w, rows)]))
            column = draw(st.sampled_from(self._readable(via, rows)))
            port = column.name if draw(st.booleans()) else f"p{len(takes)}"
            port = port if all(t.port != port for t in takes) else f"p{len(takes)}"
            takes.append(Take(port, via, column, ""))
        after = {t.via for t in takes}.union(*(self.known[t.via].before for t in takes))
        return tuple(self._shaped(t, rows, "sampler" in after) for t in takes)

    def _readable(self, via: str, rows: str) -> list[Col]:
        visible = self.known[via].visible
        columns = [
            c for c, w in visible.items() if rows != "step" or self.known[w].rows == "step" or _joins(c)
        ]
        # What promises are made of is read more often than the rest.
        return [c for c in columns for _ in range(1 + 4 * c.bounds + 3 * bool(c.facts))]

    def _shaped(self, take: Take, rows: str, sampled: bool) -> Take:
        """A value without dims may be read once a leaf, and on a step once a trajectory."""
        column = take.column
        writer = self.known[self.known[take.via].visible[column]].rows
        shapes = [column.shape]
        if not column.shape and rows == "trajectory" and sampled:
            shapes = ["", "leaf"]
        if not column.shape and rows == "step" and writer != "step":
            shapes = ["trajectory", "leaf"]
        shape = self.draw(st.sampled_from(shapes))
        mask = column.dtype == "bool" and (MASK in column.facts or self.draw(st.booleans()))
        return take._replace(shape=shape, mask=mask)

    def _dims_of(self, rows: str, role: str, takes: Sequence[Take]) -> list[str]:
        """The shapes that the hop can give: it knows the dims that it has read."""
        read = {t.shape.split()[0] for t in takes if t.shape}
        if any(t.column.bounds for t in takes) or role == "sampler":
            read |= {"leaf", "token", "leaf+1"}
        if {"leaf", "token"} <= read:
            read.add("leaf+1")
        if role == "source":
            read.add("prompt")
        elif rows == "step":
            read.add("trajectory")
            read.discard("prompt")
        return sorted(read)

    # --- what it gives ----------------------------------------------------------------------------------------

    def _gives(
        self, name: str, rows: str, role: str, takes: Sequence[Take], dims: Sequence[str]
    ) -> tuple[Col, ...]:
        draw = self.draw
        own: list[Col] = []
        if role == "source":
            own.append(Col("prompt", "array", "prompt", "int32"))
        if role == "sampler":
            own.append(Col("leaf_offsets", "array", "leaf+1", "int64"))
        tokens = ["token"] * 6 if "token" in dims else []
        for i in range(draw(st.integers(3 if role == "sampler" else 0, 5))):
            dim = draw(st.sampled_from(["", *dims, *tokens]))
            own.append(self._column(f"{name}_{i}", rows, dim, takes, own))
        return tuple(own)

    def _column(self, name: str, rows: str, dim: str, takes: Sequence[Take], own: Sequence[Col]) -> Col:
        draw = self.draw
        if dim == "leaf+1":
            facts = draw(st.sampled_from([(), (Below("token+1"),)]))
            return Col(name, "array", dim, draw(st.sampled_from(["int32", "int64", "uint16"])), facts)
        kind = draw(st.sampled_from(["array"] * 6 + ["text", "json"]))
        if kind != "array":
            return Col(name, kind, dim, max=draw(st.integers(10, 30)))
        shape = dim if not dim or draw(st.integers(0, 3)) != 3 else f"{dim} {draw(st.integers(2, 3))}"
        dtype = draw(st.sampled_from(DTYPES))
        derived = self._derivable(shape, own)
        if derived is not None:
            dtype, fact = derived
            mask = dtype == "bool" and _may_mask(shape, own)
            return Col(name, "array", shape, dtype, (fact, MASK) if mask else (fact,))
        return Col(name, "array", shape, dtype, self._facts(shape, dtype, takes, own))

    def _derivable(self, shape: str, own: Sequence[Col]) -> tuple[str, Fact] | None:
        sources = [c.name for c in own if c.kind == "array" and c.shape == shape and not _derived(c)]
        if not sources or self.draw(st.integers(0, 3)) != 3:
            return None
        dtype = self.draw(st.sampled_from(sorted(DERIVED)))
        chosen = self.draw(st.lists(st.sampled_from(sources), min_size=1, max_size=2, unique=True))
        return dtype, Derivable(DERIVED[dtype], tuple(chosen))

    def _facts(self, shape: str, dtype: str, takes: Sequence[Take], own: Sequence[Col]) -> tuple[Fact, ...]:
        """Promises that the content keeps, with the ports that they speak of by name."""
        draw = self.draw
        facts: list[Fact] = []
        bounds = [t.port for t in takes if t.column.bounds] + [c.name for c in own if c.bounds]
        masks = [t.port for t in takes if t.mask and t.shape == shape]
        masks += [c.name for c in own if MASK in c.facts and c.shape == shape]
        if shape == "token" and bounds:
            edge = draw(st.sampled_from(bounds))
            # A hop that has a mask means it: only one without any says that every token is valid.
            mask = draw(st.sampled_from(masks)) if masks else ""
            spread = [LastToken("leaf", edge, mask), TiledOver("leaf", edge, mask)]
            fact = draw(st.sampled_from([None, *spread, *[Shared("leaf", edge)] * (dtype != "bool")]))
            facts += [fact] if fact is not None else []
        if dtype == "bool" and not facts and _may_mask(shape, own) and draw(st.booleans()):
            facts.append(MASK)
        if dtype in INTEGERS and draw(st.booleans()):
            some = ["256", "257", "65536", "65537", "leaf+1", "token+2"]
            # Leaves that share the prompt alone, where data fills its dims, have a number of their own behind it.
            if not any(isinstance(fact, Shared) for fact in facts):
                some += ["2", "7", *(["vocab"] if "vocab" in self.dims else [])]
            facts.append(Below(draw(st.sampled_from(some))))
        return tuple(facts)

    # --- how long it lives ------------------------------------------------------------------------------------

    def with_lifetimes(self) -> tuple[Made, ...]:
        return tuple(one._replace(lifetime=self._lifetime(one)) for one in self.hops)

    def _lifetime(self, one: Made) -> Lifetime:
        """Any that lasts until its last reader has fired."""
        readers = {
            h.rows for h in self.hops for t in h.takes if self.known[t.via].visible[t.column] == one.name
        }
        lives: list[Lifetime] = ["firing", "trajectory", "group", "consumed", "step", "version"]
        if one.rows != "step" and "step" in readers:
            lives = lives[3:]
        elif one.rows == "group" and "trajectory" in readers:
            lives = lives[1:]
        return self.draw(st.sampled_from(lives))


def _may_mask(shape: str, own: Sequence[Col]) -> bool:
    """Whether no column of the hop said before that every token is valid."""
    said = [f for c in own if c.shape == shape for f in c.facts if isinstance(f, LastToken | TiledOver)]
    return all(fact.mask for fact in said)


def _derived(column: Col) -> bool:
    return any(isinstance(fact, Derivable) for fact in column.facts)


def _joins(column: Col) -> bool:
    """Whether a step can read it of its trajectories."""
    return not column.shape or column.shape.split()[0] in ("leaf", "token", "leaf+1")
