"""The graph file's own form: which keys stand where, before anything is imported or resolved."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from flowgraph.errors import Diagnostic, Place
from flowgraph.spec.budgets import BudgetDecl, read_budgets
from flowgraph.spec.dims import Size
from flowgraph.spec.form import (
    MANY,
    Count,
    GraphForm,
    HopForm,
    InputForm,
    ModelLock,
    OwnerForm,
    Positive,
    RunDecl,
    kinds,
)
from flowgraph.spec.reader import Reader, closest, shown
from flowgraph.spec.source import OPTION, Located

FILE_NAME = re.compile(r"[\w-][\w.-]{0,99}")
NAME = re.compile(r"[^\W\d][\w-]*")
# How many rows of these there are is the same each time; how many of those follows.
WHOLE = ("group", "sample")
MADE = {"trajectory": "a step has group*sample of them", "step": "it is one row"}


class InputDecl(msgspec.Struct):
    """`in: {port: hop}` or `in: {port: {from: hop.column, delay: 1, max_lag: 0, every: 1}}`.

    unsure: whether a max_lag is meant that could not be read
    """

    port: str
    ref: str
    place: Place
    at: Place
    delay: int = 0
    max_lag: int | None = None
    every: int = 1
    unsure: bool = False


class HopDecl(msgspec.Struct):
    """One entry of `hops:`. partial: keys that could not be read whole, or may be there under another name."""

    name: str
    place: Place
    use: str
    use_place: Place
    inputs: dict[str, InputDecl]
    config: Located | None = None
    owner: str | None = None
    owner_place: Place | None = None
    capacity: int | None = None
    capacity_place: Place | None = None
    partial: frozenset[str] = frozenset()


class OwnerDecl(msgspec.Struct):
    """One entry of `owners:`; `engine` and `learner` are its resource's options, with positions.

    ranks: dim → among how many processes it splits the work; rank_places: where each stands
    partial: keys that may be there under another name
    """

    name: str
    place: Place
    threads: int | None = None
    engine: Located | None = None
    learner: Located | None = None
    partial: frozenset[str] = frozenset()
    ranks: dict[str, int] = {}
    rank_places: dict[str, Place] = {}


class GraphFile(msgspec.Struct):
    """A graph as written, every part with its place. partial: the sections that could be read in part only."""

    name: str
    file: str
    doc: str
    dims: dict[str, Size]
    dim_places: dict[str, Place]
    owners: dict[str, OwnerDecl]
    hops: dict[str, HopDecl]
    run: RunDecl
    models: dict[str, ModelLock]
    place: Place
    budgets: tuple[BudgetDecl, ...] = ()
    partial: frozenset[str] = frozenset()


def read_graph(file: str, root: Located) -> tuple[GraphFile, list[Diagnostic]]:
    """Check the keys of a whole file. The result is usable as far as it could be read."""
    reader = Reader(file)
    needed = {"graph": "add `graph:` with a name", "hops": "add `hops:`; `flowgraph init` writes a ring"}
    record = reader.record(root, "the graph", kinds(GraphForm), needed, at=Place(file, 1, 1))
    top, partial = record.values, set(record.unsure)
    name = reader.convert(top["graph"], str, "graph", "graph") if "graph" in top else "graph"
    if not FILE_NAME.fullmatch(name):
        help = "use letters, digits, - and _, at most 100"
        reader.error("FG106", top["graph"].place, f"the graph's name {name[:40]!r} is no file name", help)
    sections: dict[str, dict[str, Located]] = {}
    for key in ("dims", "owners", "hops"):
        sections[key], whole = reader.section(top.get(key), key)
        if not whole:
            partial.add(key)
    if "hops" in top and not sections["hops"] and "hops" not in partial:
        reader.error("FG105", top["hops"].place, "the graph has no hops", needed["hops"])
    owners = {"driver": OwnerDecl("driver", root.place)}
    owners |= {
        key: _owner(reader, key, node, top["owners"].keys[key]) for key, node in sections["owners"].items()
    }
    known = sections["hops"] if "hops" not in partial and all(map(NAME.fullmatch, sections["hops"])) else ()
    graph = GraphFile(
        name=name,
        file=file,
        doc=reader.convert(top["doc"], str, "doc", "") if "doc" in top else "",
        dims={key: _size(reader, key, node) for key, node in sections["dims"].items()},
        dim_places={key: node.place for key, node in sections["dims"].items()},
        owners=owners,
        hops={
            key: _hop(reader, key, node, top["hops"].keys[key], sections["hops"])
            for key, node in sections["hops"].items()
        },
        run=_run(reader, top["run"], known) if "run" in top else RunDecl(),
        models=reader.convert(top["models"], dict[str, ModelLock], "models", {}) if "models" in top else {},
        place=root.place,
        budgets=tuple(read_budgets(reader, top.get("budgets"))),
        partial=frozenset(partial),
    )
    return graph, reader.found


def _size(reader: Reader, name: str, node: Located) -> Size:
    what = f"dims.{name}"
    size: Size
    help = f"write {name}: 8, or {name}: {{mean: 4, max: 8}}"
    if isinstance(node.value, dict):
        size = reader.convert(node, Size, what, Size(1, 1), help)
    elif isinstance(node.value, int) and not isinstance(node.value, bool):
        size = Size(mean=node.value, max=node.value)
    elif node.unread:
        size = Size(1, 1)
    else:
        reader.error(
            "FG106", node.place, f"{what} must be a whole number or a mean and a max, not {shown(node)}", help
        )
        size = Size(1, 1)
    if not (1 <= size.max <= MANY and 0 <= size.mean <= size.max):
        help = f"give 0 <= mean <= max and 1 <= max <= {MANY}"
        reader.error("FG106", node.place, f"{what} has mean {size.mean:g} and max {size.max:g}", help)
        size = Size(1, 1)
    if name in WHOLE and size.mean != size.max:
        message = f"{what} has mean {size.mean:g} and max {size.max:g}, and the ring always makes as many"
        reader.error(
            "FG106", node.place, message, f"write {name}: {size.max}, which is how many there always are"
        )
        size = Size(size.max, size.max)
    if name in MADE:
        message = f"{what} can't be given: {MADE[name]}"
        reader.error("FG106", node.place, message, f"remove {name}: from dims:")
    return size


def _named(reader: Reader, what: str, name: str, place: Place) -> None:
    if not NAME.fullmatch(name):
        help = "use letters, digits, - and _, and a letter first"
        reader.error("FG106", place, f"{what} name {name[:40]!r} can't be referred to", help)


def _ref(reader: Reader, node: Located, what: str, help: str) -> str:
    """A name, or names with dots between; "" for what could not be read, and so always with a finding."""
    ref: str = reader.convert(node, str, what, "")
    if all(ref.split(".")):
        return ref
    if not node.unread and isinstance(node.value, str):
        problem = f"has an empty name: {shown(node)}" if ref else "is empty"
        reader.error("FG106", node.place, f"{what} {problem}", help)
    return ""


def _owner(reader: Reader, name: str, node: Located, place: Place) -> OwnerDecl:
    _named(reader, "owner", name, place)
    what = f"owners.{name}"
    record = reader.record(node, what, kinds(OwnerForm))
    keys = record.values
    out = OwnerDecl(
        name, place, engine=keys.get("engine"), learner=keys.get("learner"), partial=record.unsure
    )
    if "threads" in keys:
        out.threads = reader.convert(keys["threads"], Positive, f"{what}.threads", 1)
    axes, _ = reader.section(keys.get("ranks"), f"{what}.ranks")
    for axis, value in axes.items():
        out.ranks[axis] = reader.convert(value, Positive, f"{what}.ranks.{axis}", 1)
        out.rank_places[axis] = keys["ranks"].keys[axis]
    if "processes" in keys:
        _processes(reader, out, keys["processes"], keys["processes"].place, alone=not axes)
    return out


def _processes(reader: Reader, out: OwnerDecl, node: Located, place: Place, *, alone: bool) -> None:
    """`processes: n` of a learner is short for `ranks: {trajectory: n}`. alone: there are no ranks beside it"""
    what = f"owners.{out.name}.processes"
    count = reader.convert(node, Positive, what, 1)
    if count == 1:
        return
    if not alone:
        help = f"write ranks: alone, of which processes: {count} is short for ranks: {{trajectory: {count}}}"
        reader.error("FG106", place, f"{what} says again what ranks: of {out.name} say", help)
    elif out.learner is None and "learner" not in out.partial:
        message = (
            f"owner {out.name} asks for {count} processes, and has no learner whose work they could share"
        )
        help = "write processes: 1, or give it a learner:; an engine has processes of its own under engine:"
        reader.error("FG106", place, message, help)
    else:
        out.ranks, out.rank_places = {"trajectory": count}, {"trajectory": place}


def _hop(reader: Reader, name: str, node: Located, place: Place, hops: Collection[str]) -> HopDecl:
    _named(reader, "hop", name, place)
    what = f"hops.{name}"
    # An override of a hop that is not there makes one.
    meant = closest(name, [other for other in hops if other != name]) if place.file == OPTION else None
    hint = f"did you mean hops.{meant}? " if meant else ""
    needed = {"use": f"{hint}add `use:` with an import path such as hops.reward.score"}
    record = reader.record(node, what, kinds(HopForm), needed, at=place)
    keys, partial = record.values, set(record.unsure)
    out = HopDecl(name, place, "", place, {}, config=keys.get("with"))
    if "use" in keys:
        out.use, out.use_place = _ref(reader, keys["use"], f"{what}.use", needed["use"]), keys["use"].place
    for key in ("in", "with"):
        values, whole = reader.section(keys.get(key), f"{what}.{key}")
        partial |= set() if whole else {key}
        for port, value in values.items() if key == "in" else ():
            out.inputs[port] = _input(reader, f"{what}.in.{port}", port, value, keys["in"].keys[port])
    if "owner" in keys:
        help = f"write the name of an owner, or remove {what}.owner"
        out.owner, out.owner_place = _ref(reader, keys["owner"], f"{what}.owner", help), keys["owner"].place
    if "capacity" in keys:
        out.capacity_place = keys["capacity"].place
        out.capacity = reader.convert(keys["capacity"], Count, f"{what}.capacity", None)
    out.partial = frozenset(partial)
    return out


def _input(reader: Reader, what: str, port: str, node: Located, at: Place) -> InputDecl:
    out = InputDecl(port, "", node.place, at)
    if isinstance(node.value, str):
        out.ref = _ref(reader, node, what, f"write {port}: and the hop that it comes from, or hop.column")
        return out
    if not isinstance(node.value, dict) and node.unread:
        return out
    if not isinstance(node.value, dict):
        help = f"write {port}: and the hop that it comes from, or {{from: hop}}"
        reader.error(
            "FG106", node.place, f"{what} must be a hop's name or a mapping, not {shown(node)}", help
        )
        return out
    needed = {"from": "write the hop that it comes from, or {from: hop}"}
    record = reader.record(node, what, kinds(InputForm), needed)
    keys = record.values
    if "from" in keys:
        out.ref, out.place = _ref(reader, keys["from"], f"{what}.from", needed["from"]), keys["from"].place
    # What can't be read is taken as what has no findings of its own.
    out.delay = 1 if "delay" in record.unsure else 0
    out.unsure = "max_lag" in record.unsure
    if "delay" in keys:
        out.delay = reader.convert(keys["delay"], Count, f"{what}.delay", 1)
    if "every" in keys:
        out.every = reader.convert(keys["every"], Positive, f"{what}.every", 1)
    if "max_lag" in keys:
        out.max_lag = reader.convert(keys["max_lag"], Count, f"{what}.max_lag", None)
        out.unsure = out.max_lag is None
    return out


def _run(reader: Reader, node: Located, hops: Collection[str]) -> RunDecl:
    """`run:`. hops: those that there are; none when that can't be told."""
    out = RunDecl()
    types = kinds(RunDecl)
    values = reader.record(node, "run", types).values
    for key, value in values.items():
        setattr(out, key, reader.convert(value, types[key], f"run.{key}", getattr(out, key)))
    for name, item in zip(out.show, values["show"].value if out.show else (), strict=True):
        hop, dot, metric = name.partition(".")
        if dot and hops and hop not in hops:
            meant = closest(hop, hops)
            hint = f"did you mean {meant}.{metric}? " if meant else ""
            message = f"run.show names {name}, and there is no hop {hop!r}"
            reader.error("FG108", item.place, message, f"{hint}hops: {', '.join(hops)}")
    return out
