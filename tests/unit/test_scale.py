"""Sizes that run nowhere here: models by their numbers, replay of routing to the byte, ranks and their slices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import pytest
from click.testing import CliRunner
from jaxtyping import Float32, Int32

import flowgraph
from flowgraph import Array, Learner, Tensors, effect
from flowgraph.cli import main
from flowgraph.errors import ModelError
from flowgraph.models import ensure, facts
from flowgraph.models.configs import config_of
from flowgraph.models.facts import config_facts
from flowgraph.models.sources import PRICED
from flowgraph.report.audit.rows import FieldRow
from tests.runtime.harness import steps

ROOT = Path(__file__).parents[2]
GRAPHS = ROOT / "graphs"
TOKENS, TRAJECTORIES = 32_768, 512
# Layers, layers with experts, experts, top-k and parameters in billions, as published.
PUBLISHED = {
    "deepseek-v3": (61, 58, 256, 8, 671),
    "deepseek-v3.2": (61, 58, 256, 8, 672),
    "qwen3-30b-a3b": (48, 48, 128, 8, 30.5),
    "glm-4.5": (92, 89, 160, 8, 353),  # 355 with the layer that predicts a second token, which is not trained
    "kimi-k2": (61, 60, 384, 8, 1026),
}
REPLAYS = {
    "r3_deepseek_v3": (61, 8, 1),
    "dsa_deepseek_v3_2": (61, 8, 1),
    "r3_qwen3_30b_a3b": (48, 8, 1),
    "r3_glm_4_5": (92, 8, 1),
    "r3_kimi_k2": (61, 8, 2),  # 384 experts need two bytes
}


def field(graph: str, port: str) -> FieldRow:
    found = flowgraph.audit(GRAPHS / f"{graph}.yaml")
    return next(f for s in found.seams if s.reader == "train" for f in s.fields if f.port == port)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_priced_model_has_its_published_numbers(name: str) -> None:
    found = facts(name)
    assert found is not None
    assert (found.layers, found.moe_layers, found.experts, found.top_k) == PUBLISHED[name][:4]
    assert found.parameters / 1e9 == pytest.approx(PUBLISHED[name][4], rel=0.002)
    assert found.bytes == 2 * found.parameters
    assert found.index_top_k == (2048 if name == "deepseek-v3.2" else None)
    assert set(PUBLISHED) == set(PRICED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_table_is_what_transformers_makes_of_the_config(name: str) -> None:
    shipped = json.loads((ROOT / "flowgraph" / "models" / f"{name}.json").read_text())
    arguments = ", ".join(f"{k}={v!r}" for k, v in shipped["config"]["arguments"].items())
    text = f"transformers.{shipped['config']['class']}({arguments})"
    made, known = config_facts(config_of(text), text), facts(name)
    assert known is not None
    assert {t.name: t.shape for t in made.tensors} == {t.name: t.shape for t in known.tensors}
    numbers = (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "vocab",
        "experts",
        "top_k",
        "moe_layers",
        "index_top_k",
    )
    assert [getattr(made, n) for n in numbers] == [getattr(known, n) for n in numbers]


def test_what_has_no_weights_is_priced_and_not_run() -> None:
    with pytest.raises(ModelError, match="deepseek-v3 has numbers and no weights here") as error:
        ensure("deepseek-v3")
    assert "deepseek-ai/DeepSeek-V3" in error.value.help


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("transformers.NoSuchConfig", "has no NoSuchConfig"),
        ("transformers.Qwen3MoeConfig(48)", "an argument without a name"),
        ("transformers.Qwen3MoeConfig(num_hidden_layers=open('x'))", "no class of transformers with literal"),
        ("transformers.Qwen3MoeConfig(num_hidden_layers=", "there is no model"),
        ("deepsek-v3", "did you mean 'deepseek-v3'"),
    ],
)
def test_a_model_that_is_none_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ModelError) as error:
        facts(text)
    assert said in str(error.value)


def test_a_config_without_weights_is_known_by_its_numbers(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500, "max_position_embeddings": 128,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96,
        "mlp_only_layers": [0], "tie_word_embeddings": False,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    found = facts(str(file))
    assert found is not None
    assert found == facts(str(tmp_path))
    assert (found.layers, found.moe_layers, found.experts, found.top_k, found.vocab) == (3, 2, 8, 2, 500)
    head = 2 * 500 * 64 + 64
    attention = 64 * 64 * 2 + 2 * 64 * 32 + 2 * 16 + 2 * 64  # q and o, k and v, norms of heads, norms
    assert found.parameters == head + 3 * attention + 3 * 64 * 96 + 2 * (8 * 3 * 64 * 32 + 8 * 64)


def test_the_model_option_prices_the_whole_graph_with_another_model() -> None:
    loaded = flowgraph.load(GRAPHS / "r3_deepseek_v3.yaml", model="qwen3-30b-a3b")
    assert loaded.graph is not None
    assert {o.model for o in loaded.graph.owners.values() if o.model} == {"qwen3-30b-a3b"}
    seam = next(s for s in flowgraph.audit(loaded).seams if (s.source, s.reader) == ("train", "sync"))
    assert seam.fields[0].mean == pytest.approx(61.06e9, rel=0.001)
    command = ["check", str(GRAPHS / "quickstart.yaml"), "--model", "qwen3-30b"]
    wrong = CliRunner().invoke(main, command)
    assert wrong.exit_code == 1
    assert wrong.stderr.count("error[FG113] there is no model 'qwen3-30b'") == 2
    assert "did you mean 'qwen3-30b-a3b'" in wrong.stderr


# --- replay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", REPLAYS)
def test_replay_of_routed_experts_agrees_with_the_published_arithmetic(graph: str) -> None:
    layers, top_k, narrow = REPLAYS[graph]
    one = field(graph, "routed_experts")
    assert one.naive is not None
    assert one.naive.token_raw == layers * top_k * 4
    assert one.naive.token_base64 == pytest.approx(layers * top_k * 4 * 4 / 3, abs=0.001)
    assert one.naive.read_raw == layers * top_k * 4 * TOKENS * TRAJECTORIES
    assert one.naive.controller_raw == 2 * one.naive.read_raw
    assert one.mean == one.max == layers * top_k * narrow * TOKENS * TRAJECTORIES


def test_the_bytes_of_a_token_are_those_that_were_published() -> None:
    routed, indexed = field("r3_deepseek_v3", "routed_experts"), field("dsa_deepseek_v3_2", "indexer_topk")
    assert routed.naive is not None
    assert indexed.naive is not None
    assert (routed.naive.token_raw, round(routed.naive.token_base64 or 0)) == (1952, 2603)
    assert indexed.naive.token_raw == 499_712
    assert indexed.encoding == "as uint16"  # positions below 32,768


@pytest.mark.parametrize("graph", REPLAYS)
def test_of_replay_the_driver_moves_tens_of_kilobytes(graph: str) -> None:
    found = flowgraph.audit(GRAPHS / f"{graph}.yaml")
    assert 10e3 < found.driver.mean <= found.driver.max < 64e3
    assert found.naive is not None
    assert found.naive.controller_raw > 100_000 * found.driver.mean
    result = CliRunner().invoke(main, ["audit", str(GRAPHS / f"{graph}.yaml"), "--naive"])
    assert result.exit_code == 0
    assert "still moves once on the data plane" in result.stdout
    assert "each of " in result.stdout
    assert "ranks reads 1/" in result.stdout


# --- ranks -------------------------------------------------------------------------------------------------------


def test_a_rank_reads_the_slice_of_the_axes_that_split_a_column() -> None:
    routed = field("r3_deepseek_v3", "routed_experts")
    assert routed.ranks == 32 * 4 * 8
    assert routed.split == (("trajectory", 32), ("token", 4), ("layers", 8))
    assert routed.slice_bytes == routed.mean / (32 * 4 * 8) == 61 * 8 * TOKENS * TRAJECTORIES / 1024
    assert field("r3_deepseek_v3", "logprobs").split == (("trajectory", 32), ("token", 4))
    loaded = flowgraph.load(GRAPHS / "quickstart.yaml", {"owners.trainer.ranks": {"trajectory": 4}})
    seams = {(s.source, s.reader): s for s in flowgraph.audit(loaded).seams}
    weights = seams["train", "sync"].fields[0]
    assert (weights.ranks, weights.split, weights.slice_bytes) == (
        1,
        (),
        weights.mean,
    )  # read by the engine, whole
    tokens = next(f for f in seams["batch", "train"].fields if f.port == "tokens")
    assert (tokens.ranks, tokens.split, tokens.slice_bytes) == (4, (("trajectory", 4),), tokens.mean / 4)
    assert {f.ranks for f in seams["batch", "reward"].fields} == {1}, "only what uses the learner is shared"
    plain = {
        (s.source, s.reader): s for s in flowgraph.audit(GRAPHS / "quickstart.yaml", no_pass=["fuse"]).seams
    }
    assert {k: s.mean for k, s in seams.items() if k[1] == "train"} == {
        k: s.mean for k, s in plain.items() if k[1] == "train"
    }


@effect(uses=Learner, owner="trainer", lifetime="version", described="a trainer elsewhere")
def trains_elsewhere(
    advantages: Float32[Array, "token"],
    routed_experts: Int32[Array, "token layers top_k"],
    *,
    learner: Learner,
) -> Annotated[dict[str, Any], Tensors()]:
    """Says what crosses, no more."""


def test_what_is_only_described_or_split_among_ranks_does_not_run(tmp_path: Path) -> None:
    graph = tmp_path / "described.yaml"
    shutil.copy(GRAPHS / "r3_deepseek_v3.yaml", graph)
    use, inputs = f"{__name__}.trains_elsewhere", "{advantages: advantage, routed_experts: batch}"
    described = f"hops.train={{use: {use}, in: {inputs}}}"
    with pytest.raises(flowgraph.CheckError) as error:
        flowgraph.run(graph, runs=tmp_path / "runs", overrides=[described])
    assert {d.code for d in error.value.diagnostics} == {"FG114"}
    assert {" ".join(d.message.split(" ")[:5]) for d in error.value.diagnostics} == {
        "the model of owner rollout,",
        "the model of owner trainer,",
        "owner trainer splits its work",
        f"hop train ({use}) only describes",
    }
    assert not (tmp_path / "runs").exists()
    checked = CliRunner().invoke(main, ["check", str(graph), "--set", described])
    assert checked.stdout.endswith("priced only: train, rollout, trainer\n")


# --- prompts off the driver --------------------------------------------------------------------------------------

CURSOR = {
    "hops.dataset": {"use": "hops.dataset.cursor"},
    "hops.prompt": {
        "use": "hops.dataset.render",
        "in": {"row": "dataset"},
        "with": {
            "rows": {
                "use": "hops.rows.reasoning_gym",
                "task": "chain_sum",
                "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                "format": "compact",
                "shots": 4,
                "held_out": 0.4,
                "split": "train",
            }
        },
    },
    "hops.dispatch.in.group": "prompt",
    "dims.group": 2,
    "dims.sample": 2,
    "run.steps": 2,
}


def test_prompts_that_are_rendered_where_they_are_read_never_touch_the_driver() -> None:
    loaded = flowgraph.load(GRAPHS / "quickstart.yaml", CURSOR)
    assert loaded.diagnostics == []
    seams = {(s.source, s.reader): s for s in flowgraph.audit(loaded).seams}
    prompt = next(f for f in seams["dispatch", "rollout"].fields if f.port == "prompt")
    assert (prompt.producer, prompt.owners) == ("prompt", ("rollout", "rollout"))
    assert seams["dispatch", "rollout"].driver == 4 * 8  # the keys
    assert seams["dataset", "prompt"].mean == 2 * 8


@pytest.mark.slow
def test_the_ring_samples_the_same_tokens_with_prompts_off_the_driver(smollm2: str, tmp_path: Path) -> None:
    """From a run's first step, batches are the same rows: rewards, losses and lengths are equal."""
    assert smollm2
    small = {k: v for k, v in CURSOR.items() if k.startswith(("dims", "run"))}
    found = []
    for name, overrides in (("driver", small), ("worker", CURSOR)):
        loaded = flowgraph.load(GRAPHS / "quickstart.yaml", {**overrides, "hops.eval.with.prompts": 1})
        done = flowgraph.run(loaded, executor="inproc", runs=tmp_path / name, live=False)
        found.append(steps(done.directory))
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_layers_with_experts_are_counted_in_the_tensors() -> None:
    step = "transformers.Qwen3MoeConfig(num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[0])"
    some = "transformers.Qwen3MoeConfig(num_hidden_layers=8, mlp_only_layers=[0, 1, 2, 99])"
    assert [one.moe_layers for text in (step, some) if (one := facts(text))] == [4, 5]


def test_an_argument_that_a_config_does_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match="Qwen3MoeConfig has no num_layer") as error:
        facts("transformers.Qwen3MoeConfig(num_layer=3)")
    assert "did you mean num_" in error.value.help


@pytest.mark.parametrize(("axis", "parts"), [("layers", 100), ("trajectory", 1000), ("leaf", 1000)])
def test_no_axis_splits_more_than_there_is(axis: str, parts: int) -> None:
    loaded = flowgraph.load(GRAPHS / "r3_deepseek_v3.yaml", {"owners.trainer.ranks": {axis: parts}})
    assert [d.code for d in loaded.diagnostics] == ["FG106"]


def test_a_model_without_weights_is_refused_before_a_run(tmp_path: Path) -> None:
    loaded = flowgraph.load(GRAPHS / "quickstart.yaml", {"budgets": {}}, model="qwen3-30b-a3b")
    with pytest.raises(flowgraph.CheckError, match="is known by its numbers and has no weights"):
        flowgraph.run(loaded, runs=tmp_path / "runs")


def test_a_file_is_written_through_a_link_and_a_device_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target.svg", tmp_path / "link.svg"
    target.write_text("")
    link.symlink_to(target)
    graph = str(ROOT / "tests" / "runtime" / "toy.yaml")
    assert CliRunner().invoke(main, ["draw", graph, "-o", str(link)]).exit_code == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<svg")
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_a_run_is_priced_as_it_ran_and_no_other_size_is_taken_beside_it(tmp_path: Path) -> None:
    graph = str(GRAPHS / "quickstart.yaml")
    beside = (["--set", "dims.group=4"], ["--model", "kimi-k2"], ["--no-pass", "fuse"])
    for command in (["audit", graph], ["draw", graph]):
        for one in beside:
            done = CliRunner().invoke(main, [*command, "--run", str(tmp_path), *one])
            assert done.exit_code == 2
            assert "--run prices what ran" in done.stderr
