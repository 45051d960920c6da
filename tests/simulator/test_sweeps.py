"""Sweeps: what may be swept, how values are separated, and what becomes of a row that can't be simulated."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from flowgraph.cli import main

GRAPH = "graphs/quickstart.yaml"


def _run(*args: str) -> Result:
    return CliRunner().invoke(main, ["simulate", GRAPH, "--steps", "6", "--warmup", "0", *args])


@pytest.mark.parametrize(
    ("options", "swept"),
    [
        (["--train-seconds", "2"], "train-seconds=2"),
        (["--train-seconds", "2"], "train_seconds=2"),
        (["--train-rate", "300"], "train-rate=300"),
        (["--sync-seconds", "3"], "sync-seconds=3"),
        (["--max", "5"], "max=5"),
        (["--max", "5"], "most=5"),
        (["--decode", "0.5,0.01"], "decode=0.5,0.01"),
        (["--prefill", "100"], "prefill=100"),
        (["--seconds", "reward=4"], "seconds.reward=4"),
        (["--kv", "100"], "kv=100"),
        (["--lengths", "lognormal:4,1.2"], "lengths=lognormal:4,1.2;"),
    ],
)
def test_an_option_that_is_swept_is_the_option_itself(options: list[str], swept: str) -> None:
    plain = ["--lengths", "exponential:4", "--prompts", "uniform:9,40"]
    alone = json.loads(_run(*plain, *options, "--json").stdout)
    found = json.loads(_run(*plain, "--sweep", swept, "--json").stdout)
    assert [one["result"] for one in found] == [alone]
    assert json.loads(_run(*plain, "--json").stdout) != alone, "the option changes nothing here"


def test_values_that_have_commas_are_separated_by_semicolons() -> None:
    swept = ["--sweep", "lengths=lognormal:4,1.2;fixed:3", "--sweep", "decode=0.1,0.01;0.2,0"]
    found = json.loads(_run(*swept, "--json").stdout)
    assert [tuple(one["set"].values()) for one in found] == [
        (lengths, decode) for lengths in ("lognormal:4,1.2", "fixed:3") for decode in ("0.1,0.01", "0.2,0")
    ]
    assert all(one["result"]["steps"] == 6 for one in found)


@pytest.mark.parametrize(
    ("swept", "said"),
    [
        ("lengths=lognormal:20,1.2", "separate values that have commas by ; as in lengths=lognormal:20,1.2;"),
        ("lengths=", "'lengths=' is not of the form path=value,value,…"),
        (
            "output=a,b",
            "'output' can't be swept; give a path such as dims.group, hop.option, or one of engines,",
        ),
        ("speed=1", "'speed' can't be swept"),
        ("seconds=1", "'seconds' can't be swept"),
        ("decode=fast", "give seconds as A,B or A,B,C"),
        ("kv=20,30", "kv: 20 tokens hold no prompt and response of 56"),
        ("seconds.rewarding=1", "there is no hop rewarding that takes time"),
    ],
)
def test_what_can_not_be_swept_is_told_in_one_sentence(swept: str, said: str) -> None:
    done = _run("--sweep", swept)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_row_that_does_not_fit_or_fails_leaves_the_others() -> None:
    swept = ["--sweep", "kv=20,4000", "--sweep", "failures=0,0.95"]
    found = json.loads(_run(*swept, "--json").stdout)
    assert [one["result"] is not None for one in found] == [False, False, True, False]
    assert [one["refused"] for one in found[:2]] == [
        "kv: 20 tokens hold no prompt and response of 56; give 56 or more"
    ] * 2
    assert "groups in a row were dropped" in found[3]["failed"]
    assert "\n  help: " in found[3]["failed"]
    text = _run(*swept).output
    assert text.count("refused") == 2
    assert "kv=20, failures=0: kv: 20 tokens hold" in text
    assert "kv=4000, failures=0.95: error[FG902] fold batch" in text
    assert "help:" not in text


def test_a_sweep_of_which_every_row_fails_ends_as_the_first_one_does() -> None:
    done = _run("--sweep", "failures=0.95,0.96")
    assert done.exit_code == _run("--failures", "0.95").exit_code != 0
    assert "groups in a row were dropped" in done.output


@pytest.mark.parametrize(
    ("swept", "said"),
    [
        (
            ["dispatch.watermark=8"],
            "has no option 'watermark'; did you mean target? options: target, adapt, least",
        ),
        (["dispatch.targte=8"], "has no option 'targte'; did you mean target? options: target, adapt, least"),
        (["engines=1,2", "engines=3"], "engines is swept twice; give all its values in one --sweep engines="),
        (["max=4,5", "most=6"], "most is swept twice"),
        (["seconds.rollout=1"], "how long rollout takes is how long its requests are decoded"),
        (["seconds.=1"], "'seconds.' can't be swept"),
    ],
)
def test_what_a_sweep_would_do_nothing_with_is_refused(swept: list[str], said: str) -> None:
    done = _run(*(part for one in swept for part in ("--sweep", one)))
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_narrow_table_leaves_columns_out_from_the_right_and_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swept = [
        "--sweep",
        "dispatch.version.max_lag=0,1",
        "--sweep",
        "lengths=lognormal:4,1;lognormal:5,1",
    ]
    for columns in (20, 80, 110):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = _run(*swept).stdout.splitlines()
        rows = [line.split() for line in lines if " lognormal:" in line]
        assert [row[:2] for row in rows] == [
            [lag, lengths] for lag in "01" for lengths in ("lognormal:4,1", "lognormal:5,1")
        ]
        table = [line for line in lines if line.startswith(" ")]
        assert columns == 20 or max(map(len, table)) <= columns
        assert lines[-1].startswith("left out for want of width: ") == (columns < 110)
    monkeypatch.setenv("COLUMNS", "80")
    assert _run(*swept).stdout.splitlines()[-1].endswith("lag, max, dropped; --json has all")


def test_a_sweep_says_what_was_cut_at_its_worst() -> None:
    done = _run("--sweep", "lengths=fixed:8;fixed:9;lognormal:4,1")
    said = "up to 100% of responses are cut at 8 (dims.response.max); --max raises it"
    assert f"warning: {said}\n" == done.stderr
    assert said in done.stdout.splitlines()
