"""Who has integers in a byte writes them in a byte, and who can read them in a byte is given no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgraph.errors import PayloadError, PromiseBroken
from flowgraph.passes.pipeline import load
from tests.runtime.harness import TOY, run_toy, steps

HERE = "tests.runtime.narrow"
DIMS = ("dims.layer=2", "dims.expert=200")
READERS = (
    f"hops.one={{use: {HERE}.one, in: {{tokens: rollout, experts: choose}}}}",
    f"hops.all={{use: {HERE}.all, in: {{tokens: batch, experts: batch, leaf_offsets: batch}}}}",
    f"hops.wide={{use: {HERE}.wide, in: {{tokens: batch, experts: batch}}}}",
    "hops.buffer.in.trajectory=one",
    "hops.dispatch.in.finished=one",
)


def choose(**options: object) -> str:
    given = ", ".join(f"{name}: {value}" for name, value in options.items())
    return f"hops.choose={{use: {HERE}.choose, in: {{tokens: rollout}}, with: {{{given}}}}}"


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
@pytest.mark.parametrize("verify", [False, True])
def test_integers_lie_in_a_byte_and_are_read_so_or_as_the_port_says(
    tmp_path: Path, dtype: str, verify: bool
) -> None:
    done = run_toy(tmp_path, *DIMS, choose(dtype=dtype), *READERS, verify=verify)
    for one in steps(done.directory):
        assert (one["one.itemsize"], one["all.itemsize"], one["wide.itemsize"]) == (1, 1, 4)
        assert one["one.copied"] == 0


def test_without_the_pass_they_lie_as_the_port_says(tmp_path: Path) -> None:
    done = run_toy(tmp_path, *DIMS, choose(), *READERS, off=("narrow",))
    assert {(one["one.itemsize"], one["all.itemsize"]) for one in steps(done.directory)} == {(4, 4)}


def test_a_reader_on_the_writers_owner_is_given_what_the_port_says(tmp_path: Path) -> None:
    at = READERS[0].replace("in: ", "owner: rollout, in: ")
    done = run_toy(tmp_path, *DIMS, choose(), at, *READERS[1:])
    assert {one["one.itemsize"] for one in steps(done.directory)} == {4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"over": 199}, "breaks the promise .* of experts: element .* is .*, and the bound is 200"),
        ({"dtype": "uint32"}, "gave experts as uint32.*, and its port is i32"),
        ({"dtype": "int64"}, "gave experts as int64.*, and its port is i32"),
        ({"dtype": "bool"}, "gave experts as bool.*, and its port is i32"),
    ],
)
def test_what_is_out_of_range_or_does_not_fit_the_port_is_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PromiseBroken if "over" in options else PayloadError, match=message):
        run_toy(tmp_path, *DIMS, choose(**options), *READERS)


@pytest.mark.parametrize(
    ("hop", "reads", "code", "message"),
    [
        (
            "real",
            "score: reward",
            "FG202",
            "reward.score is f32[leaf], but added reads score as integer[leaf]",
        ),
        (
            "vague",
            "tokens: rollout",
            "FG201",
            f"port experts of {HERE}.vague has no exact dtype: Integer",
        ),
    ],
)
def test_only_integers_are_read_as_integers_and_who_gives_them_says_which(
    hop: str, reads: str, code: str, message: str
) -> None:
    found = load(TOY, [f"hops.added={{use: {HERE}.{hop}, in: {{{reads}}}}}"]).diagnostics
    assert [(one.code, one.message) for one in found] == [(code, message)]
    if hop == "vague":
        assert (
            found[0].help
            == "say the width, e.g. Int32; only who reads it may take integers as they lie, by Integer"
        )
