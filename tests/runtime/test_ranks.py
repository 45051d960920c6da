"""A learner of several processes: each reads its own trajectories and nothing else, and what it sees is whole."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowgraph
from flowgraph.errors import HopError, RunError
from flowgraph.plan.compile import compile_file
from flowgraph.plan.copies import copies
from flowgraph.plan.parts import axis
from flowgraph.plan.plan import Plan
from flowgraph.plan.predict import predict
from flowgraph.runtime.executors import InProcess
from flowgraph.runtime.messages import Share
from flowgraph.runtime.pieces import ranges
from flowgraph.runtime.ring import Ring
from flowgraph.runtime.sharing import share_out
from flowgraph.runtime.transport import arenas
from flowgraph.spec.types import Row
from tests.runtime.ranked import READS, TOY, USE, Memory, overrides, remembering
from tests.runtime.test_ring import Collector

PER_LEAF, PER_TOKEN = (
    ("wide", "small", "double", "notes"),
    ("tokens", "response_mask", "advantages", "bits", "last"),
)
PER_TRAJECTORY = ("uid", "ground_truth", "each")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a learner may name; no test here loads it."""
    import json

    from safetensors.numpy import save_file

    path = tmp_path_factory.mktemp("model")
    numbers = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 8}
    (path / "config.json").write_text(json.dumps({**numbers, "max_position_embeddings": 64}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    save_file({"weight": np.zeros((8, 16), np.float32)}, path / "model.safetensors")
    return path


def run(
    model: Path, processes: int, *sets: str, off: Sequence[str] = (), verify: bool = False
) -> tuple[Ring, list[Memory], Collector]:
    """The toy ring to its end; and what the learner of each process was given."""
    plan = compile_file(TOY, [*overrides(model, processes), *sets], off=off)
    plan = msgspec.structs.replace(plan, verify=verify)
    told, executor = Collector(), InProcess()
    with remembering(), arenas(plan, alone=True) as memory:
        ring = Ring(plan, executor, {str(model): str(model)}, memory, told)
        try:
            executor.start(plan, {str(model): str(model)}, memory)
            ring.start()
            held = [w.resources["learner"] for w in executor.workers.values() if "learner" in w.resources]
            ring.run()
        finally:
            executor.stop(0)
    return ring, held, told


def by_trajectory(given: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Number of a trajectory in its step (`each`) → its part of every column that one process was given."""
    leaves = np.diff(given["leaf_offsets"])
    out = {}
    assert len(leaves) == 2 * len(given["each"]), "two leaves a trajectory"
    assert given["bounds"].tolist() == given["leaf_offsets"].tolist()
    for i, key in enumerate(given["each"].tolist()):
        of_leaves, of_tokens = slice(2 * i, 2 * i + 2), slice(*given["leaf_offsets"][[2 * i, 2 * i + 2]])
        out[key] = {name: given[name][of_leaves] for name in PER_LEAF}
        out[key] |= {name: given[name][of_tokens] for name in PER_TOKEN}
        out[key] |= {name: given[name][:, of_tokens] for name in ("across", "stripes")}
        out[key] |= {name: given[name][i] for name in PER_TRAJECTORY}
    return out


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert np.array_equal(value, other[name]), name


@pytest.mark.parametrize("off", [(), ("fold", "encode", "narrow"), ("defer", "fuse")])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_are_given_together_what_one_is_given(
    model: Path, processes: int, off: tuple[str, ...]
) -> None:
    _, (alone,), told = run(model, 1, off=off)
    ring, held, shared = run(model, processes, off=off)
    assert len(held) == processes
    assert [len(one.given) for one in held] == [6] * processes
    for step, whole in enumerate(alone.given):
        parts = [by_trajectory(one.given[step]) for one in held]
        assert sorted(key for part in parts for key in part) == list(range(6)), "each by exactly one"
        wanted = by_trajectory(whole)
        for part in parts:
            for key, found in part.items():
                assert_equal(found, wanted[key])
        for one in held:  # what no row has a part of is read whole
            assert one.given[step]["whole"].tolist() == whole["whole"].tolist()
    assert all(one["train.rank"] == 0 for one in shared.steps), "the first process speaks for all"
    assert not any(
        hop for hop, home in ring.table.homes.items() if home.live and hop not in ("train", "dataset")
    )
    assert [one["reward.reward"] for one in told.steps] == [one["reward.reward"] for one in shared.steps]


def test_B1_seven_trajectories_on_two_processes_are_four_and_three_and_no_pad_is_anywhere(
    model: Path,
) -> None:
    _, held, told = run(model, 2, *RESCORE, "dims.group=1", "dims.sample=7")
    for step, one in enumerate(told.steps):
        given = [each.given[step] for each in held]
        assert sorted(key for each in given for key in each["each"].tolist()) == list(range(7))
        assert sorted(len(each["uid"]) for each in given) == [3, 4]
        assert sum(len(each["leaf_offsets"]) - 1 for each in given) == 14, "two leaves each"
        assert sum(len(each["tokens"]) for each in given) == one["tokens"]
        assert all(np.diff(each["leaf_offsets"]).all() for each in given), "a pad would have no token"
        assert [one[f"compare.{name}"] for name in JOINED] == [0.0] * len(JOINED)


def test_the_bytes_that_are_read_are_those_that_are_predicted(model: Path) -> None:
    """Of what is cut that is as many as one process reads, but for bytes in which two rows' bits meet, and bounds."""
    one, _, _ = run(model, 1, off=("fuse",))
    ring, _, _ = run(model, 3)
    measured = ring.meter.measured(6, 0)
    expected = predict(ring.plan, measured.lengths)
    whole = {"whole": 3, "notes": 3}  # read by all
    for port in READS:
        read, before = measured.read[f"train.{port}"], one.meter.read[f"train.{port}"]
        if port in ("bits", "stripes", "bounds"):
            assert before < read <= before + 6 * 8 * 6 * 2, port
            continue
        assert read == expected[f"train.{port}"], port
        # A group's values are read by each process that has one of it; nobody derives a part of a step's column.
        if port not in ("ground_truth", "double"):
            assert read == before * whole.get(port, 1), port
    for one_port in ("wide", "small", "bits", "tiled", "notes"):  # as often as the plan has it
        read = next(r for r in ring.plan.hops["train"].reads if r.port == one_port)
        expects = copies(ring.plan, ring.plan.hops["train"], read)
        assert expects is not None
        assert measured.copied is not None
        assert (
            measured.copied.reader[f"train.{one_port}"] == expects.reader * measured.read[f"train.{one_port}"]
        )
    prices = {f.port: f for seam in ring.plan.seams if seam.reader == "train" for f in seam.fields}
    assert (prices["tokens"].ranks, prices["tokens"].split) == (3, (("trajectory", 3),))
    assert (prices["whole"].ranks, prices["whole"].split) == (3, ())
    assert prices["whole"].mean_bytes == 3 * 32 == 3 * prices["whole"].slice_bytes
    assert prices["wide"].slice_bytes == prices["wide"].mean_bytes / 3 == 4 * 3 * 12 / 3


def test_a_hop_that_fires_on_all_ranks_is_fused_with_no_other(model: Path) -> None:
    alone, shared = (compile_file(TOY, overrides(model, n)) for n in (1, 2))
    assert "train" in alone.hops["advantage"].group
    assert shared.hops["train"].group == ()
    assert shared.hops["advantage"].group == ("reward", "advantage")
    ranks = compile_file(TOY, [*overrides(model, 1), "owners.trainer.ranks={trajectory: 2}"])
    assert ranks.hops == shared.hops
    assert ranks.owners == shared.owners


def test_a_process_that_fails_is_named_with_its_rank(model: Path) -> None:
    said = r"hop train: ArithmeticError: no gradient on owner trainer, rank 1 \(step 1\)"
    with pytest.raises(HopError, match=said):
        run(model, 2, "hops.train.with={fail_on: 1}")


def test_one_process_can_not_hold_several(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="owner trainer is 2 processes, and the executor inproc is one"):
        flowgraph.run(TOY, executor="inproc", runs=tmp_path, overrides=overrides(model, 2))


JOINED = ("rescored", "kept", "two", "best", "ends", "first", "constant")
RESCORE = (
    f"hops.rescore={{use: {USE}.rescore, in: {{tokens: batch, leaf_offsets: batch, uid: batch}}}}",
    f"hops.compare={{use: {USE}.compare, in: {{tokens: batch, leaf_offsets: batch, uid: batch, "
    + ", ".join(f"{name}: rescore" for name in JOINED)
    + "}}",
)


@pytest.mark.parametrize("off", [(), ("fold", "encode", "narrow"), ("defer",)])
@pytest.mark.parametrize("processes", [1, 2, 5])
def test_B6_what_each_gives_for_its_rows_is_joined_in_their_order(
    model: Path, processes: int, off: tuple[str, ...]
) -> None:
    ring, _, told = run(model, processes, *RESCORE, off=off)
    for name in JOINED:
        assert [one[f"compare.{name}"] for one in told.steps] == [0.0] * 6, name
    sizes = ring.table.homes["rescore"].live
    assert sizes == 0
    wrote = {name: n for name, n in ring.meter.wrote.items() if name.startswith("rescore.")}
    alone, _, _ = run(model, 1, *RESCORE, off=off)
    assert wrote == {name: n for name, n in alone.meter.wrote.items() if name.startswith("rescore.")}
    read = next(r for r in ring.plan.hops["compare"].reads if r.port == "two")
    made = copies(ring.plan, ring.plan.hops["compare"], read)
    assert made is not None
    assert made.writer == ring.meter.copied.writer["rescore.two"] / wrote["rescore.two"] == min(processes, 2)
    assert ring.plan.hops["rescore"].dims == alone.plan.hops["rescore"].dims


def test_overlap_and_verify_mode_change_nothing_of_it(model: Path) -> None:
    ring, held, told = run(model, 3, *RESCORE, "hops.dispatch.in.version.max_lag=2", verify=True)
    assert ring.ledger.counts.consumed == 36
    assert max(int(str(one["lag_max"])) for one in told.steps) <= 2
    assert [len(one.given) for one in held] == [6, 6, 6]
    for name in JOINED:
        assert [one[f"compare.{name}"] for one in told.steps] == [0.0] * 6, name


def test_what_nobody_reads_of_the_rows_leaves_the_step_its_lengths(model: Path) -> None:
    _, _, alone = run(model, 1, RESCORE[0])
    _, _, told = run(model, 3, RESCORE[0])
    assert [one["tokens"] for one in alone.steps] == [one["tokens"] for one in told.steps]


# --- who takes what ----------------------------------------------------------------------------------------------


def shares_of(plan: Plan, lengths: Sequence[tuple[int, int]]) -> list[Share]:
    rows = [
        Row(
            "trajectory",
            i,
            (Row("group", i // 3, dims={"prompt": 2}),),
            dims={"token": tokens, "leaf": leaves},
        )
        for i, (tokens, leaves) in enumerate(lengths)
    ]
    return share_out(plan, "trainer", rows)


@functools.cache
def compiled(model: Path, processes: int, pack: str) -> Plan:
    return compile_file(TOY, [*overrides(model, processes), f"owners.trainer.learner.pack={pack}"])


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 4)), min_size=4, max_size=40),
    processes=st.integers(2, 4),
    pack=st.sampled_from(["tree", "padded"]),
)
def test_each_trajectory_is_in_exactly_one_share(
    model: Path, lengths: list[tuple[int, int]], processes: int, pack: str
) -> None:
    shares = shares_of(compiled(model, processes, pack), lengths)
    assert len(shares) == processes
    assert sorted(i for one in shares for i in one.members) == list(range(len(lengths)))
    assert all(one.members and one.members == sorted(one.members) for one in shares)
    for dim, sizes in (("token", [n for n, _ in lengths]), ("leaf", [n for _, n in lengths])):
        total = sum(sizes)
        taken = [i for one in shares for a, b in ranges(one, dim, total) for i in range(a, b)]
        assert sorted(taken) == list(range(total))


def test_a_step_with_fewer_trajectories_than_processes_is_refused(model: Path) -> None:
    plan = compile_file(TOY, overrides(model, 3))
    with pytest.raises(
        RunError, match="a step of 2 trajectories can't be shared out to the 3 processes of owner"
    ):
        shares_of(plan, [(3, 1), (4, 1)])


def test_where_rows_lie_is_told_by_the_form_in_which_they_lie(model: Path) -> None:
    hops = compile_file(TOY, overrides(model, 2)).hops
    found = {
        c.name: axis(c) for name in ("odd", "promised", "advantage") for c in hops[name].columns if c.written
    }
    assert {name: one and tuple(one) for name, one in found.items()} == {
        "wide": (0, "leaf", False),
        "across": (1, "token", False),
        "stripes": (1, "token", False),
        "bounds": (0, "leaf", True),
        "notes": None,
        "each": (0, "trajectory", False),
        "whole": None,
        "bits": (0, "token", False),
        "last": (0, "leaf", False),
        "tiled": (0, "leaf", False),
        "small": (0, "leaf", False),
        "double": (0, "leaf", False),
        "out": (0, "leaf", False),
    }
