"""What each pass does to a small graph, and what it leaves alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import yaml
from jaxtyping import Int64

from flowgraph import Array, Below, Derivable, LastToken, Learner, Shared, Tensors, TiledOver, effect, hop
from flowgraph.ir.graph import Graph, Node
from flowgraph.passes.pipeline import load
from flowgraph.passes.rewrite import PASSES, SOURCE, rewrite, stages
from flowgraph.passes.verify import verify
from flowgraph.plan.compile import compile_file
from flowgraph.spec.forms import Bits, PerRow, Prefix, Wire
from tests.graphs.content import MASK, Col, mixed
from tests.graphs.rings import Made, graph_of
from tests.graphs.small_rings import (
    BOUNDS,
    PROMPT,
    TILED,
    TOKENS,
    TRUTH,
    VALID,
    one,
    sampler,
    small,
    tokens,
)
from tests.unit.graphs import good


def graph(tmp_path: Path, *hops: Made, source: tuple[Col, ...] = (PROMPT,), **dims: int) -> Graph:
    return graph_of(small(*hops, source=source, **dims), tmp_path)[0]


def wire(after: Graph, column: str) -> Wire:
    (node,) = (n for n in after.nodes.values() if n.column(column))
    return node.wire(column)


def only(name: str, before: Graph) -> Graph:
    """The graph after one pass alone, verified."""
    return rewrite(before, off=[other for other in PASSES if other != name])


# --- the table -------------------------------------------------------------------------------------------------


def test_a_pass_that_is_off_is_left_out_and_the_others_keep_their_order(tmp_path: Path) -> None:
    names = [name for name, _ in stages(good(tmp_path), off=["encode", "fuse"])]
    assert names == [SOURCE, "project", "fold", "narrow", "place", "defer"]


@pytest.mark.parametrize("name", PASSES)
def test_a_second_time_a_pass_changes_nothing(name: str, tmp_path: Path) -> None:
    hops = one("a", "batch.tiled batch.valid batch.bounds"), one("b", "a.valid a.tokens")
    before = graph(tmp_path, sampler(BOUNDS, VALID, TOKENS, TILED), *hops, response=30)
    after = only(name, before)
    assert only(name, after).nodes == after.nodes


def move(node: Node) -> Node:
    return msgspec.structs.replace(node, owner="rollout")


def unwrite(node: Node) -> Node:
    return msgspec.structs.replace(node, wires={"tokens": Wire(written=False)})


def unread(node: Node) -> Node:
    return msgspec.structs.replace(node, bindings=node.bindings[:1])


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("a", move, "only free hops move: a moved from trainer to rollout"),
        ("sampler", unwrite, "what is read can be had: a reads sampler.tokens, which is not written"),
        ("a", unread, "the wiring is as it was: a reads otherwise"),
    ],
)
def test_a_pass_that_breaks_a_rule_is_named_with_the_rule(
    name: str, change: Callable[[Node], Node], said: str, tmp_path: Path
) -> None:
    before = graph(tmp_path, sampler(BOUNDS, TOKENS), one("a", "batch.tokens batch.bounds"))
    after = before.with_nodes({name: change(before.nodes[name])})
    with pytest.raises(AssertionError, match=f"pass wrong: {said}"):
        verify("wrong", before, after)


# --- project ---------------------------------------------------------------------------------------------------


def test_project_writes_only_what_somebody_reads(tmp_path: Path) -> None:
    after = only("project", graph(tmp_path, sampler(BOUNDS, TOKENS), one("a", "batch.tokens")))
    assert wire(after, "tokens").written
    assert not wire(after, "bounds").written


# --- fold ------------------------------------------------------------------------------------------------------


def test_fold_sends_a_value_a_row_to_who_reads_mask_and_bounds_anyway(tmp_path: Path) -> None:
    reader = one("a", "batch.tiled batch.valid batch.bounds")
    after = only("fold", graph(tmp_path, sampler(BOUNDS, VALID, TILED), reader))
    assert wire(after, "tiled").form == PerRow("leaf", "bounds", "valid", False)


def test_fold_is_not_taken_where_mask_and_bounds_cost_more_than_it_saves(tmp_path: Path) -> None:
    # 4 tokens a leaf: 16 bytes become 4, and 4 of mask and 12 of bounds are read besides
    made = sampler(BOUNDS, VALID, TILED)
    assert wire(only("fold", graph(tmp_path, made, one("a", "batch.tiled"))), "tiled").form is None
    long = graph(tmp_path, made, one("a", "batch.tiled"), response=30)
    assert wire(only("fold", long), "tiled").form is not None


def test_fold_needs_the_mask_to_live_as_long_as_the_reader_needs_it(tmp_path: Path) -> None:
    after = tokens("after", LastToken("leaf", "bounds", "valid"))
    hops = one("t", "sampler.bounds sampler.valid", after, rows="trajectory"), one("a", "batch.lag t.after")
    long = graph(tmp_path, sampler(BOUNDS, VALID), *hops, response=30)
    assert wire(only("fold", long), "after").form == PerRow("leaf", "bounds", "valid", True)
    short = graph(tmp_path, sampler(BOUNDS, VALID, lifetime="trajectory"), *hops, response=30)
    assert wire(only("fold", short), "after").form is None


def test_fold_leaves_masks_alone_so_that_no_two_take_each_other_to_be_undone(tmp_path: Path) -> None:
    one_way = tokens("one_way", TiledOver("leaf", "bounds", "other"), MASK, dtype="bool")
    other = tokens("other", TiledOver("leaf", "bounds", "one_way"), MASK, dtype="bool")
    reader = one("a", "batch.one_way batch.other batch.bounds")
    after = rewrite(graph(tmp_path, sampler(BOUNDS, one_way, other), reader, response=30))
    assert wire(after, "one_way").form == wire(after, "other").form == Bits()


def test_fold_reads_what_trajectories_share_once_a_group_on_steps_only(tmp_path: Path) -> None:
    hops = one("t", "dispatch.truth", rows="trajectory"), one("a", "batch.truth batch.key")
    after = only("fold", graph(tmp_path, sampler(BOUNDS), *hops, source=(PROMPT, TRUTH)))
    once = {f"{n.name}.{b.port.name}" for n in after.nodes.values() for b in n.bindings if b.once}
    assert once == {"a.truth"}


# --- encode ----------------------------------------------------------------------------------------------------


def test_encode_makes_bits_of_masks_but_not_of_a_single_one(tmp_path: Path) -> None:
    single = Col("single", "array", "", "bool", (MASK,))
    reader = one("a", "batch.valid batch.single")
    after = only("encode", graph(tmp_path, sampler(BOUNDS, VALID, single), reader))
    assert wire(after, "valid").form == Bits()
    assert wire(after, "single").form is None


def test_encode_leaves_prefixes_alone_where_there_is_one_leaf_or_too_little_in_common(tmp_path: Path) -> None:
    made, reader = (
        sampler(BOUNDS, tokens("ids", Shared("leaf", "bounds"))),
        one("a", "batch.ids batch.bounds"),
    )
    assert wire(only("encode", graph(tmp_path, made, reader, prompt=9)), "ids").form == Prefix("bounds")
    assert wire(only("encode", graph(tmp_path, made, reader, prompt=9, leaf=1)), "ids").form is None
    # 2 counts of 4 bytes, for a prompt of 2 tokens of 4 bytes
    assert wire(only("encode", graph(tmp_path, made, reader, prompt=2)), "ids").form is None


def test_encode_sends_nothing_to_who_has_what_a_column_is_made_of(tmp_path: Path) -> None:
    made = sampler(TOKENS, BOUNDS, tokens("sum", Derivable(mixed, ("tokens",)), dtype="int64"))
    has, lacks = one("a", "batch.tokens batch.sum"), one("b", "batch.sum")
    after = only("encode", graph(tmp_path, made, has))
    assert [b.derived for b in after.nodes["a"].bindings] == [False, True]
    assert not wire(after, "sum").written
    both = only("encode", graph(tmp_path, made, has, lacks))
    assert [b.derived for b in both.nodes["a"].bindings] == [False, True]
    assert wire(both, "sum").written


def test_encode_keeps_what_a_form_takes_to_be_undone(tmp_path: Path) -> None:
    edges = Col("edges", "array", "leaf+1", "int64", (Derivable(mixed, ("bounds",)),))
    made = sampler(BOUNDS, edges, tokens("ids", Shared("leaf", "edges")))
    reader = one("a", "batch.bounds batch.edges batch.ids")
    kept = only("encode", graph(tmp_path, made, reader, prompt=9))
    assert wire(kept, "ids").form == Prefix("edges")
    assert wire(kept, "edges").written
    assert not any(b.derived for b in kept.nodes["a"].bindings)


# --- narrow ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bound", "stored"),
    [
        ("int64", "256", "uint8"),
        ("int64", "257", "uint16"),
        ("int64", "leaf+1", "uint8"),
        ("int32", "65537", ""),  # 32 bits hold it already
        ("uint8", "7", ""),
        ("int64", "vocab", ""),  # of a model that is not there
        ("int64", "4294967297", ""),
    ],
)
def test_narrow_stores_integers_below_a_known_bound_in_the_smallest_dtype(
    dtype: str, bound: str, stored: str, tmp_path: Path
) -> None:
    made = sampler(BOUNDS, tokens("ids", Below(bound), dtype=dtype))
    after = only("narrow", graph(tmp_path, made, one("a", "batch.ids")))
    assert wire(after, "ids").dtype == stored


def test_narrow_keeps_the_form_of_a_column(tmp_path: Path) -> None:
    counts = tokens("counts", TiledOver("leaf", "bounds", "valid"), Below("7"), dtype="int64")
    reader = one("a", "batch.counts batch.valid batch.bounds")
    after = rewrite(graph(tmp_path, sampler(BOUNDS, VALID, counts), reader))
    assert wire(after, "counts") == Wire(form=PerRow("leaf", "bounds", "valid", False), dtype="uint8")


# --- place and defer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "readers first"])
def test_place_moves_a_free_hop_and_the_free_hops_before_it_to_the_reader(
    tmp_path: Path, turned: bool
) -> None:
    hops = (
        one("first", "batch.tokens", tokens("x"), owner=None),
        one("second", "first.x", tokens("y"), owner=None),
        one("placed", "second.y", tokens("z"), owner="driver"),
        one("last", "second.y placed.z", owner="third"),
        one("end", "last.y", owner=None),  # read by nobody
    )
    before = graph(tmp_path, sampler(BOUNDS, TOKENS), *(reversed(hops) if turned else hops))
    after = only("place", before)
    assert {n: after.nodes[n].owner for n in ("first", "second", "placed", "last", "end")} == {
        "first": "third",
        "second": "third",
        "placed": "driver",
        "last": "third",
        "end": "driver",
    }
    assert (before.mapped, after.mapped) == (False, True)
    assert {n.owner for n in after.nodes.values() if n.spec.facts.kind == "fold"} == {"driver"}


def test_defer_takes_payload_off_the_way_through_the_driver(tmp_path: Path) -> None:
    before = graph(tmp_path, sampler(BOUNDS, TOKENS), one("a", "batch.tokens"))
    assert all(node.relayed for node in before.nodes.values())
    assert not any(node.relayed for node in only("defer", before).nodes.values())


# --- fuse ------------------------------------------------------------------------------------------------------

X, Y, Z = (tokens(name) for name in "xyz")


def groups(after: Graph) -> list[set[str]]:
    heads = dict.fromkeys(n.group for n in after.nodes.values() if n.group)
    return [{n.name for n in after.nodes.values() if n.group == head} for head in heads]


def fused(tmp_path: Path, *hops: Made) -> list[set[str]]:
    return groups(only("fuse", graph(tmp_path, sampler(BOUNDS, TOKENS), *hops)))


def test_fuse_joins_a_chain_of_one_owner_and_writes_only_what_others_read(tmp_path: Path) -> None:
    hops = one("a", "batch.tokens", X), one("b", "a.x", Y), one("c", "b.y", owner="third")
    after = only("fuse", graph(tmp_path, sampler(BOUNDS, TOKENS), *hops))
    assert groups(after) == [{"a", "b"}]
    assert not wire(after, "x").written
    assert wire(after, "y").written


def test_fuse_keeps_what_a_form_that_is_read_outside_takes(tmp_path: Path) -> None:
    hops = (
        one("a", "batch.bounds", VALID),
        one("b", "a.bounds a.valid", TILED),
        one("c", "b.tiled", owner="third"),
    )
    after = rewrite(graph(tmp_path, sampler(BOUNDS), *hops, response=60))
    assert groups(after) == [{"a", "b"}]
    assert isinstance(wire(after, "tiled").form, PerRow)
    assert wire(after, "valid").written  # only b reads it, and c needs it to spread what it reads


@pytest.mark.parametrize(
    "hops",
    [
        (one("a", "batch.tokens", X), one("b", "a.x", owner="third")),
        (one("a", "batch.tokens", X), one("b", "a.x", concurrent=True)),
        (one("a", "batch.tokens", X), one("b", "a.x", every=2)),
        (one("a", "sampler.tokens", X, rows="trajectory"), one("b", "batch.lag a.x")),
        (one("a", "batch.tokens", X), one("b", "batch.tokens", Y)),
    ],
    ids=["another owner", "async", "on fewer rows", "on other rows", "neither follows the other"],
)
def test_fuse_leaves_apart_what_does_not_fire_alike(hops: tuple[Made, ...], tmp_path: Path) -> None:
    assert fused(tmp_path, *hops) == []


def test_fuse_leaves_apart_what_waits_for_somebody_in_between(tmp_path: Path) -> None:
    """a → away → b with a → b: fused, a and b would wait for away, and away for them."""
    hops = one("a", "batch.tokens", X), one("away", "a.x", Y, owner="third"), one("b", "a.x away.y", Z)
    assert fused(tmp_path, *hops) == []
    # What b waits for and a does not hold up may come before both.
    early = (
        one("early", "batch.tokens", Y, owner="third"),
        one("a", "early.tokens", X),
        one("b", "a.x early.y"),
    )
    assert fused(tmp_path, *early) == [{"a", "b"}]


def test_fuse_leaves_a_publisher_apart(tmp_path: Path) -> None:
    before = graph(tmp_path, sampler(BOUNDS), one("a", "batch.batch_id"))
    assert before.nodes["sync"].owner == before.nodes["a"].owner == "trainer"
    assert groups(only("fuse", before)) == []


@effect(uses=Learner, owner="trainer", lifetime="version")
def learn(batch_id: Int64[Array, ""], *, learner: Learner) -> Annotated[dict[str, Any], Tensors()]:
    raise NotImplementedError


@hop(owner="trainer")
def inspect_weights(weights: Annotated[dict[str, Any], Tensors()]) -> Int64[Array, ""]:
    raise NotImplementedError


def test_fuse_leaves_a_reader_of_tensors_apart_from_their_writer(tmp_path: Path) -> None:
    here = __name__
    small = "tests.diagnostics.small"
    hops = f"""\
  source: {{use: {small}.source}}
  split: {{use: {small}.split_by_version, in: {{group: source, version: {{from: sync, delay: 1, max_lag: 1}}}}}}
  batch: {{use: {small}.batch, in: {{trajectory: split}}}}
  learn: {{use: {here}.learn, in: {{batch_id: batch}}}}
  look: {{use: {here}.inspect_weights, in: {{weights: learn}}}}
  sync: {{use: {small}.publish, in: {{batch_id: learn}}}}
"""
    top = "owners: {trainer: {learner: {use: torch, model: smollm2-135m, lr: 1.0e-5}}}\n"
    before = good(tmp_path, hops, top=top)
    assert before.nodes["look"].owner == before.nodes["learn"].owner
    assert groups(only("fuse", before)) == []


def test_a_plan_does_not_depend_on_the_order_of_the_hops_in_the_file(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "graphs/quickstart.yaml"
    tree, rng = yaml.safe_load(path.read_text()), random.Random(0)
    as_written = compile_file(str(path))
    for number in range(20):
        names = rng.sample(list(tree["hops"]), len(tree["hops"]))
        shuffled = tmp_path / f"{number}.yaml"
        hops = {name: tree["hops"][name] for name in names}
        shuffled.write_text(yaml.safe_dump({**tree, "hops": hops}, sort_keys=False))
        plan = compile_file(str(shuffled))
        assert {n: (h.owner, h.group) for n, h in plan.hops.items()} == {
            n: (h.owner, h.group) for n, h in as_written.hops.items()
        }
        assert plan.driver_bytes == as_written.driver_bytes


def test_a_free_hop_with_a_tokenizer_stays_where_it_is_when_its_reader_has_another(tmp_path: Path) -> None:
    """Without place it is on the driver, with the tokenizer of the first model that any owner names."""
    loaded = load("graphs/quickstart.yaml")
    assert loaded.graph is not None
    assert only("place", loaded.graph).nodes["reward"].owner == "trainer"
    engine = loaded.graph.owners["rollout"].engine
    assert engine is not None
    judge = msgspec.structs.replace(
        loaded.graph.owners["rollout"], name="judge", engine=msgspec.structs.replace(engine, model="another")
    )
    before = msgspec.structs.replace(loaded.graph, owners={"judge": judge, **loaded.graph.owners})
    assert only("place", before).nodes["reward"].owner == "driver"
