"""`flowgraph simulate` and `flowgraph.simulate`: what they print, refuse and repeat."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

import flowgraph
from flowgraph.cli import main
from flowgraph.simulator.trace import spare

GRAPH = "graphs/quickstart.yaml"
SHORT = ["--steps", "20", "--lengths", "exponential:4", "--train-seconds", "1", "--decode", "0.05,0.001"]


def _run(*args: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *args])


def test_what_is_printed_is_the_same_every_time_and_another_seed_is_another_run(tmp_path: Path) -> None:
    outs = []
    for i, seed in enumerate("001"):
        file = tmp_path / f"{i}.svg"
        done = _run(GRAPH, *SHORT, "--seed", seed, "-o", str(file))
        assert done.exit_code == 0, done.output
        outs.append((done.output, file.read_bytes()))
    assert outs[0] == outs[1]
    assert outs[0][1] != outs[2][1]
    assert "20 steps simulated" in outs[0][0]
    assert "lag 0    100.0%" in outs[0][0]


def test_the_plot_is_xml_with_a_line_for_all_that_changes_over_time(tmp_path: Path) -> None:
    file = tmp_path / "sim.svg"
    assert _run(GRAPH, *SHORT, "-o", str(file)).exit_code == 0
    root = ElementTree.parse(file).getroot()
    panels = [g.get("data-panel") for g in root.iter() if g.get("data-panel")]
    assert panels == ["trajectories", "waiting", "lag of a batch, versions", "idle", "seconds a step"]
    lines = [g for g in root.iter() if g.tag.endswith("polyline")]
    assert len(lines) == 9
    assert all(len(str(line.get("points")).split()) == 20 for line in lines)
    assert "prefers-color-scheme: dark" in file.read_text()


def test_json_has_every_step_and_the_ledger_adds_up() -> None:
    found = json.loads(_run(GRAPH, *SHORT, "--json").stdout)
    assert len(found["points"]) == found["steps"] == 20
    ledger = found["ledger"]
    places = ledger["in_flight"] + ledger["ready"] + ledger["consumed"] + sum(ledger["dropped"].values())
    assert ledger["dispatched"] == places


def test_a_sweep_has_a_row_a_setting_and_says_why_one_is_refused() -> None:
    swept = ["--sweep", "dispatch.target=64,128", "--sweep", "engines=1,2"]
    done = _run(GRAPH, *SHORT, *swept, "--json")
    found = json.loads(done.stdout)
    assert [one["set"] for one in found] == [
        {"dispatch.target": t, "engines": e} for t in ("64", "128") for e in ("1", "2")
    ]
    assert [one["result"] is None for one in found] == [False, False, True, True]
    assert found[2]["refused"].startswith("FG402: dispatch may have 128 rows in flight")
    assert found[0]["result"]["seconds"] >= found[1]["result"]["seconds"]
    text = _run(GRAPH, *SHORT, *swept).output
    assert text.count("refused") == 2
    assert "dispatch.target=128, engines=1: FG402" in text


def test_in_a_sweep_the_same_trajectories_are_compared() -> None:
    found = flowgraph.api.sweep(  # type: ignore[attr-defined]
        GRAPH,
        ["dispatch.version.max_lag=0,1,2"],
        steps=10,
        warmup=0,
        lengths="uniform:1,8",
        train_seconds=1.0,
    )
    tokens = [one.result.tokens for one in found if one.result]
    assert len(tokens) == 3
    first = found[0].result
    assert first is not None
    again = flowgraph.simulate(GRAPH, steps=10, warmup=0, lengths="uniform:1,8", train_seconds=9.0)
    assert again.tokens == first.tokens


@pytest.mark.parametrize("graph", sorted(Path("graphs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_graph_is_simulated_as_it_is(graph: Path) -> None:
    done = flowgraph.simulate(graph, steps=2, warmup=0)
    assert done.steps == 2
    assert done.ledger.consumed >= done.trajectories > 0
    assert done.lag.max <= flowgraph.compile(graph).max_lag


def test_a_graph_that_is_only_priced_is_simulated_too() -> None:
    done = flowgraph.simulate(
        "graphs/r3_qwen3_30b_a3b.yaml", steps=3, warmup=0, engines=16, lengths="lognormal:8000,1"
    )
    assert done.trajectories == 3 * 512
    assert done.slots == 512


SCORED = [
    *(f"hops.reward.in.{name}=rollout" for name in ("tokens", "response_mask", "leaf_offsets", "uid")),
    "hops.reward.in.ground_truth=dispatch",
    "hops.dispatch.in.finished=reward",
    "hops.buffer.in.trajectory=reward",
    "hops.batch.in.score=buffer",
    "hops.batch.with={drop_equal: true}",
]


def test_a_batch_that_looks_at_scores_wants_to_know_how_often_tasks_are_solved() -> None:
    with pytest.raises(ValueError, match="hop batch reads score of the rows that it is shown: say how often"):
        flowgraph.simulate(GRAPH, steps=2, overrides=SCORED)
    done = flowgraph.simulate(GRAPH, steps=8, warmup=0, overrides=SCORED, solve="beta:1,1")
    share = done.ledger.dropped["equal scores"] / done.ledger.dispatched
    # Of 8 tries, all or none succeed for 2/9 of the groups when the share is uniform.
    assert share == pytest.approx(2 / 9, abs=0.12)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--lengths", "normal:3"], "there is no distribution 'normal'; write one of lognormal:mean,sigma"),
        (["--lengths", "lognormal:2000"], "'lognormal:2000' is not of the form lognormal:mean,sigma"),
        (["--lengths", "uniform:9,3"], "the upper end 3 is below the lower end 9"),
        (["--lengths", "trace:no.txt"], "can't read the trace 'no.txt': No such file or directory"),
        (["--kv", "20"], "kv: 20 tokens hold no prompt and response of 56; give 56 or more"),
        (
            ["--seconds", "rewarding=2"],
            "no hop rewarding that takes time; did you mean reward? hops: reward,",
        ),
        (["--decode", "fast"], "give seconds as A,B or A,B,C"),
        (["--warmup", "200"], "warmup must leave a step to measure, and is 200 of 200 steps"),
        (["--sweep", "dispatch.target"], "'dispatch.target' is not of the form path=value,value,…"),
        (["-o", "sim.png"], "a simulation is drawn as SVG"),
        (["-o", "sim.svg", "--sweep", "engines=1,2"], "-o draws one simulation, and --sweep makes many"),
        (["--sweep", "engines=1,two"], "settings: "),
        (["--seconds", "rollout=3"], "how long rollout takes is how long its requests are decoded"),
        (["--seconds", "=3"], "--seconds =3: give hop=seconds, such as reward=1.5"),
        (["--prefill", "1e-300"], "speed: prefill must be at least 1e-09 tokens/s, not 1e-300"),
        (["--train-rate", "1e-300"], "train_rate must be at least 1e-09 tokens/s"),
        (
            ["--decode", "1e300,1e300"],
            "speed: step (--decode) must be from 1e-09 to 1e+09 seconds, not 1e+300",
        ),
        (["--train-seconds", "inf"], "train_seconds must be from 0 to 1e+09 seconds, not inf"),
        (["--max", "1" + "0" * 30], "most (--max) must be at most 2,147,483,647"),
        (["--lengths", "beta:1,1"], "there is no distribution 'beta'; write one of lognormal:mean,sigma"),
        (
            ["--solve", "lognormal:1,1"],
            "there is no distribution 'lognormal'; write one of beta:a,b, uniform:low,high",
        ),
        (["--solve", "fixed:2"], "fixed:2 is no share of tries: give a number from 0 to 1"),
        (["--solve", "uniform:0.5,1.5"], "uniform:0.5,1.5 is no share of tries: give 0 <= low <= high <= 1"),
    ],
)
def test_wrong_usage_is_told_in_one_sentence(args: list[str], said: str) -> None:
    done = _run(GRAPH, *args)
    assert done.exit_code == 2
    assert said in done.output


def test_without_an_engine_what_first_writes_tokens_is_what_samples() -> None:
    done = flowgraph.simulate(
        "tests/runtime/toy.yaml", steps=5, warmup=0, lengths="fixed:3", prompts="fixed:2"
    )
    assert done.trajectories == 5 * 6
    assert done.tokens == done.trajectories * (2 + 3)
    plan = flowgraph.compile("tests/runtime/toy.yaml")
    silent = [replace(hop, dims=tuple(d for d in hop.dims if d != "token")) for hop in plan.hops.values()]
    with pytest.raises(
        ValueError, match="or writes a column with the dim token, among rollout; give the one that"
    ):
        flowgraph.simulate(replace(plan, hops={hop.name: hop for hop in silent}), steps=1)


def test_lengths_that_are_cut_are_told_with_what_cuts_them() -> None:
    asked = ["--steps", "5", "--lengths", "uniform:1,15", "--prompts", "fixed:99"]
    done = _run(GRAPH, *asked)
    found = flowgraph.simulate(GRAPH, steps=5, lengths="uniform:1,15", prompts="fixed:99")
    responses, prompts = found.cut
    assert responses.share == pytest.approx(6.5 / 14, abs=0.1)
    assert (responses.at, prompts.share, prompts.at) == (8, 1.0, 48)
    assert done.stderr == (
        f"warning: {responses.share:.0%} of responses are cut at 8 (dims.response.max); --max raises it\n"
        "warning: 100% of prompts are cut at 48 (dims.prompt.max); --set dims.prompt.max=… raises it\n"
    )
    assert f"responses cut   {responses.share:.0%} at 8 tokens" in done.stdout
    shorter = _run(GRAPH, *asked, "--max", "12", "--json")
    assert "are cut at 12 (--max); --max raises it" in shorter.stderr
    assert json.loads(shorter.stdout)["cut"][0]["at"] == 12
    whole = _run(GRAPH, "--steps", "5", "--lengths", "uniform:1,8")
    assert whole.stderr == ""
    assert "cut" not in whole.stdout


def test_the_command_and_the_function_assume_the_same() -> None:
    found = flowgraph.simulate(GRAPH, steps=5)
    assert json.loads(_run(GRAPH, "--steps", "5", "--json").stdout)["seconds"] == found.seconds
    given = flowgraph.simulate(GRAPH, steps=5, train_rate=50_000)
    assert found.seconds == given.seconds > flowgraph.simulate(GRAPH, steps=5, train_seconds=0).seconds


def test_small_things_are_written_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "sim.SVG"
    done = _run(GRAPH, "--steps", "1", "--train-seconds", "0", "-o", str(file))
    assert "quickstart: 1 step simulated, all of them measured" in done.stdout
    assert file.read_text().startswith("<svg")
    assert spare(1 + 1e-12, 1) == 0
    assert "-0.0%" not in done.stdout


def test_a_finding_ends_it_as_it_ends_a_check() -> None:
    done = _run(GRAPH, "--set", "hops.batch.capacity=2")
    assert done.exit_code == 1
    assert "FG402" in done.output


def test_a_time_limit_is_one_of_the_virtual_clock() -> None:
    limited = flowgraph.simulate(
        GRAPH, steps=6, warmup=0, lengths="lognormal:4,1", overrides=["hops.rollout.with.time_limit=0.75"],
        speed={"step": 0.1, "per_request": 0.0, "prefill": 1e9},
    )  # fmt: skip
    assert limited.ledger.dropped["time limit"] > 0
    assert limited.flight_seconds <= 0.75 + 1e-9
