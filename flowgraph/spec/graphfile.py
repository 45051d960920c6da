"""The graph file's own form: which keys stand where, before anything is imported or resolved."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from flowgraph.errors import Diagnostic, Place
from flowgraph.spec.dims import Size
from flowgraph.spec.source import Located


class InputDecl(msgspec.Struct):
    """`in: {port: hop}` or `in: {port: {from: hop.column, delay: 1, max_lag: 0, every: 1}}`."""

    port: str
    ref: str
    place: Place
    at: Place
    delay: int = 0
    max_lag: int | None = None
    every: int = 1


class HopDecl(msgspec.Struct):
    """One entry of `hops:`."""

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


class OwnerDecl(msgspec.Struct):
    """One entry of `owners:`; `engine` and `learner` are its resource's options, with positions."""

    name: str
    place: Place
    threads: int | None = None
    engine: Located | None = None
    learner: Located | None = None


class RunDecl(msgspec.Struct, forbid_unknown_fields=True):
    """`run:`. deadline: seconds that any one firing or start may take before the run fails by name."""

    steps: int = 1
    seed: int = 0
    deadline: float = 600.0
    show: list[str] = []


class ModelLock(msgspec.Struct, forbid_unknown_fields=True):
    """`models: {name: {source, sha256}}`: what a run used, so that another run can insist on it."""

    source: str
    sha256: str


class GraphFile(msgspec.Struct):
    """A graph as written, every part with its place."""

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


def near(word: str, known: Iterable[str]) -> str:
    """"did you mean x? " when one of the known names is near, else ""."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {match[0]}? " if match else ""


class Reader:
    """Collects findings while it takes a Located tree apart. Every `get` says what it wanted."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Diagnostic] = []

    def error(self, code: str, place: Place, message: str, help: str) -> None:
        self.found.append(Diagnostic(code, place, message, help))

    def mapping(self, node: Located, what: str, keys: Iterable[str] | None = None) -> dict[str, Located]:
        """The dict inside, with unknown keys reported and left out; {} when it is something else."""
        if not isinstance(node.value, dict):
            self.error("FG106", node.place, f"{what} must be a mapping, not {node.plain()!r}", f"write {what} as key: value lines")
            return {}
        if keys is None:
            return node.value
        allowed = list(keys)
        for name in node.value:
            if name not in allowed:
                help = f"{near(name, allowed)}keys here: {', '.join(allowed)}"
                self.error("FG104", node.keys.get(name, node.place), f"unknown key {name!r} in {what}", help)
        return {k: v for k, v in node.value.items() if k in allowed}

    def convert(self, node: Located, kind: Any, what: str, default: Any) -> Any:
        """The value as `kind`, or a finding and `default`."""
        try:
            return msgspec.convert(node.plain(), kind, strict=True)
        except msgspec.ValidationError as error:
            self.error("FG106", node.place, f"{what}: {str(error)[0].lower()}{str(error)[1:]}", f"mend the value of {what}")
            return default


def read_graph(file: str, root: Located) -> tuple[GraphFile, list[Diagnostic]]:
    """Check the keys of a whole file. The result is usable as far as it could be read."""
    reader = Reader(file)
    top = reader.mapping(root, "the graph", ("graph", "doc", "dims", "owners", "hops", "run", "models"))
    for key in ("graph", "hops"):
        if key not in top:
            reader.error("FG105", Place(file, 1, 1), f"the graph has no {key!r}", f"add `{key}:`")
    name = reader.convert(top["graph"], str, "graph", "graph") if "graph" in top else "graph"
    if name and not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        reader.error("FG106", top["graph"].place, f"graph name {name!r} is no file name", "use letters, digits, - and _")
    doc = reader.convert(top["doc"], str, "doc", "") if "doc" in top else ""
    dims, dim_places = _dims(reader, top.get("dims"))
    owners = {"driver": OwnerDecl("driver", root.place)}
    for key, node in reader.mapping(top["owners"], "owners").items() if "owners" in top else ():
        owners[key] = _owner(reader, key, node, top["owners"].keys[key])
    hops = {}
    for key, node in reader.mapping(top["hops"], "hops").items() if "hops" in top else ():
        hops[key] = _hop(reader, key, node, top["hops"].keys[key])
    run = _run(reader, top.get("run"))
    models = reader.convert(top["models"], dict[str, ModelLock], "models", {}) if "models" in top else {}
    return GraphFile(name, file, doc, dims, dim_places, owners, hops, run, models, root.place), reader.found


def _dims(reader: Reader, node: Located | None) -> tuple[dict[str, Size], dict[str, Place]]:
    sizes: dict[str, Size] = {}
    places: dict[str, Place] = {}
    for name, value in reader.mapping(node, "dims").items() if node else ():
        places[name] = value.place
        if isinstance(value.value, int) and not isinstance(value.value, bool):
            sizes[name] = Size(mean=value.value, max=value.value)
        else:
            sizes[name] = reader.convert(value, Size, f"dims.{name}", Size(1, 1))
        size = sizes[name]
        if size.max < 1 or not 0 <= size.mean <= size.max:
            reader.error("FG106", value.place, f"dims.{name}: mean {size.mean:g} and max {size.max}", "give 0 <= mean <= max, max >= 1")
            sizes[name] = Size(1, 1)
    return sizes, places


def _owner(reader: Reader, name: str, node: Located, place: Place) -> OwnerDecl:
    out = OwnerDecl(name, place)
    for key, value in reader.mapping(node, f"owner {name}", ("processes", "threads", "engine", "learner")).items():
        if key == "threads":
            out.threads = reader.convert(value, int, f"owners.{name}.threads", 1)
            if out.threads is not None and out.threads < 1:
                reader.error("FG106", value.place, f"owners.{name}.threads is {out.threads}", "give at least 1, or leave it out")
        elif key == "processes":
            if reader.convert(value, int, f"owners.{name}.processes", 1) != 1:
                reader.error("FG106", value.place, f"owner {name} asks for {value.plain()} processes", "write processes: 1; an owner is one process")
        else:
            reader.mapping(value, f"owners.{name}.{key}")
            setattr(out, key, value)
    return out


def _hop(reader: Reader, name: str, node: Located, place: Place) -> HopDecl:
    keys = reader.mapping(node, f"hop {name}", ("use", "in", "with", "owner", "capacity"))
    if "use" not in keys and isinstance(node.value, dict):
        reader.error("FG105", place, f"hop {name} has no `use`", "add `use:` with an import path such as hops.reward.score")
    out = HopDecl(name, place, "", place, {})
    if "use" in keys:
        out.use, out.use_place = reader.convert(keys["use"], str, f"hops.{name}.use", ""), keys["use"].place
    for port, value in reader.mapping(keys["in"], f"hops.{name}.in").items() if "in" in keys else ():
        out.inputs[port] = _input(reader, name, port, value, keys["in"].keys[port])
    if "with" in keys:
        reader.mapping(keys["with"], f"hops.{name}.with")
        out.config = keys["with"]
    if "owner" in keys:
        out.owner, out.owner_place = reader.convert(keys["owner"], str, f"hops.{name}.owner", None), keys["owner"].place
    if "capacity" in keys:
        out.capacity_place = keys["capacity"].place
        out.capacity = reader.convert(keys["capacity"], int, f"hops.{name}.capacity", None)
        if out.capacity is not None and out.capacity < 0:
            reader.error("FG106", out.capacity_place, f"hops.{name}.capacity is {out.capacity}", "give 0 or more")
    return out


def _input(reader: Reader, hop: str, port: str, node: Located, at: Place) -> InputDecl:
    what = f"hops.{hop}.in.{port}"
    if isinstance(node.value, str):
        return InputDecl(port, node.value, node.place, at)
    keys = reader.mapping(node, what, ("from", "delay", "max_lag", "every"))
    if "from" not in keys:
        reader.error("FG105", node.place, f"{what} names no hop", "write the hop that it comes from, or {from: hop}")
        return InputDecl(port, "", node.place, at)
    out = InputDecl(port, reader.convert(keys["from"], str, what, ""), keys["from"].place, at)
    for key in ("delay", "max_lag", "every"):
        if key in keys:
            value = reader.convert(keys[key], int, f"{what}.{key}", 1)
            if value < (1 if key == "every" else 0):
                reader.error("FG106", keys[key].place, f"{what}.{key} is {value}", "give a larger number")
            setattr(out, key, value)
    return out


def _run(reader: Reader, node: Located | None) -> RunDecl:
    if node is None:
        return RunDecl()
    keys = reader.mapping(node, "run", RunDecl.__struct_fields__)
    out = RunDecl()
    kinds: dict[str, Any] = {"steps": int, "seed": int, "deadline": float, "show": list[str]}
    for key, value in keys.items():
        setattr(out, key, reader.convert(value, kinds[key], f"run.{key}", getattr(out, key)))
    for key, least in (("steps", 1), ("seed", 0), ("deadline", 1)):
        if getattr(out, key) < least:
            reader.error("FG106", keys[key].place, f"run.{key} is {getattr(out, key)}", f"give at least {least}")
    return out
