"""What verl and slime ship, by their own example scripts: dims, hops and bytes, and an account of every option."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import flowgraph
from flowgraph.cli import main
from flowgraph.importers import Imported, import_slime, import_verl
from flowgraph.importers.shell import read_script
from flowgraph.report.audit import Audit

HERE = Path(__file__).parent
VERL, VERL_MOE = HERE / "verl_qwen2_7b.sh", HERE / "verl_qwen3_30b.sh"
SLIME = HERE / "slime_qwen3_30b.sh"
ROUTED = [
    "--use-rollout-routing-replay",
    "--num-layers",
    "48",
    "--moe-router-topk",
    "8",
    "--num-experts",
    "128",
]


def graph_of(made: Imported) -> dict[str, Any]:
    return dict(yaml.safe_load(made.graph))


def priced(made: Imported, folder: Path) -> Audit:
    """The audit of an imported graph, which has no findings."""
    path = folder / "imported.yaml"
    path.write_text(made.graph)
    loaded = flowgraph.load(path)
    assert loaded.diagnostics == []
    return flowgraph.audit(loaded)


def raw(found: Audit, reader: str, port: str) -> float:
    """Bytes a step that a hop gets of a port as a single controller carries it."""
    one = next(f for s in found.seams if s.reader == reader for f in s.fields if f.port == port)
    assert one.naive is not None
    return one.naive.read_raw


# --- verl --------------------------------------------------------------------------------------------------------


def test_a_script_of_verl_becomes_the_batch_that_its_workers_get(tmp_path: Path) -> None:
    made = import_verl(VERL)
    graph = graph_of(made)
    assert graph["dims"] == {
        "group": 1024,
        "sample": 5,
        "prompt": {"mean": 512, "max": 512},
        "response": {"mean": 1024, "max": 1024},
    }
    assert list(graph["hops"]) == [
        "dataset", "dispatch", "rollout", "buffer", "batch", "old_log_prob", "ref_log_prob", "advantage",
        "update_actor", "sync",
    ]  # fmt: skip
    assert graph["owners"]["actor"]["learner"]["model"] == "Qwen/Qwen2-7B-Instruct"
    assert graph["owners"]["actor"]["ranks"] == graph["owners"]["ref"]["ranks"] == {"trajectory": 8}
    found = priced(made, tmp_path)
    rows, prompt, response = 1024 * 5, 512, 1024
    assert raw(found, "update_actor", "input_ids") == rows * (prompt + response) * 8 == 62_914_560
    assert raw(found, "ref_log_prob", "responses") == rows * response * 8
    assert raw(found, "update_actor", "advantages") == rows * response * 4
    weights = next(s for s in found.seams if (s.source, s.reader) == ("update_actor", "sync"))
    assert not weights.priced  # a hub id whose numbers are not on this machine


def test_every_option_of_a_script_is_accounted_for() -> None:
    for path in (VERL, VERL_MOE):
        made = import_verl(path)
        words = [w.lstrip("+").partition("=")[0] for w in read_script(path, ("main_ppo",)).words if "=" in w]
        options = {word for word in words if not word.startswith("--")}
        assert set(made.used) | set(made.ignored) | set(made.unknown) == options
        assert made.unknown == []
    assert "trainer.logger" in import_verl(VERL).ignored


def test_arithmetic_and_defaults_of_a_script_are_those_of_bash() -> None:
    graph = graph_of(import_verl(VERL_MOE))
    assert graph["dims"]["prompt"]["max"] == 1024 * 2
    assert graph["dims"]["response"]["max"] == 1024 * 8
    assert (graph["dims"]["group"], graph["dims"]["sample"]) == (512, 16)
    assert graph["owners"]["actor"]["ranks"] == {"trajectory": 8}
    assert graph["owners"]["actor"]["learner"]["model"] == "Qwen/Qwen3-30B-A3B-Base"


@pytest.mark.parametrize(
    ("override", "there", "not_there"),
    [
        ("algorithm.adv_estimator=gae", ["values", "update_critic"], []),
        ("critic.enable=True", ["values", "update_critic"], []),
        ("actor_rollout_ref.actor.use_kl_loss=False", [], ["ref_log_prob"]),
        ("algorithm.rollout_correction.bypass_mode=True", [], ["old_log_prob"]),
    ],
)
def test_an_option_decides_who_gets_the_batch(
    override: str, there: list[str], not_there: list[str], tmp_path: Path
) -> None:
    made = import_verl(VERL, [override])
    hops = graph_of(made)["hops"]
    assert set(there) <= set(hops)
    assert not set(not_there) & set(hops)
    assert override.partition("=")[0] in made.used
    priced(made, tmp_path)


def test_a_config_file_of_verl_is_read_with_its_interpolations(tmp_path: Path) -> None:
    config = {
        "defaults": ["model@x: hf_model", "_self_"],
        "data": {"train_batch_size": 64, "max_prompt_length": 100, "max_response_length": 200, "tool": "x"},
        "actor_rollout_ref": {
            "model": {"path": "~/models/mine"},
            "rollout": {
                "n": "${oc.select:algorithm.samples,4}",
                "prompt_length": "${data.max_prompt_length}",
            },
        },
        "algorithm": {"adv_estimator": "grpo"},
        "made_up": {"by": {"me": 1}},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    made = import_verl(path, ["+data.train_batch_size=32", "~data.tool"])
    assert graph_of(made)["dims"]["group"] == 32
    assert graph_of(made)["dims"]["sample"] == 4
    assert made.unknown == ["made_up.by.me"]
    assert any("~/models/mine is not on this machine" in one for one in made.assumed)
    priced(made, tmp_path)


# --- slime -------------------------------------------------------------------------------------------------------


def test_a_script_of_slime_becomes_what_its_manager_packs(tmp_path: Path) -> None:
    made = import_slime([str(SLIME)])
    graph = graph_of(made)
    assert (graph["dims"]["group"], graph["dims"]["sample"]) == (32, 8)
    assert graph["dims"]["response"]["max"] == 8192
    assert graph["owners"]["actor"]["ranks"] == {
        "trajectory": 2
    }  # 8 GPUs, 4 of them one tensor-parallel group
    assert graph["hops"]["dispatch"]["in"]["version"]["max_lag"] == 0
    assert made.unknown == []
    assert made.used["--rollout-batch-size"] == "dims.group 32"
    found = priced(made, tmp_path)
    assert raw(found, "train", "tokens") == 256 * (1024 + 8192) * 8
    assert raw(found, "train", "loss_masks") == raw(found, "train", "rollout_log_probs") == 256 * 8192 * 4


def test_routing_replay_of_slime_ships_int32_of_all_layers(tmp_path: Path) -> None:
    script = tmp_path / "run_async.sh"
    lines = f"python3 train_async.py --rollout-batch-size 32 --n-samples-per-prompt 16 {' '.join(ROUTED)}"
    script.write_text(f"{lines} --rollout-max-prompt-len 1024 --rollout-max-response-len 31744\n")
    made = import_slime([str(script)])
    assert graph_of(made)["hops"]["dispatch"]["in"]["version"]["max_lag"] == 1
    assert raw(priced(made, tmp_path), "train", "rollout_routed_experts") == 512 * 32_768 * 48 * 8 * 4
    with pytest.raises(ValueError, match="needs --num-layers"):
        import_slime(["--rollout-batch-size", "4", "--use-rollout-routing-replay"])


KNOWN = [
    ["--rollout-shuffle"], ["--rollout-temperature", "1"], ["--use-kl-loss"], ["--lr", "1e-6"], ["--colocate"], ROUTED,
    ["--n-samples-per-prompt", "4"], ["--context-parallel-size", "2"], ["--hf-checkpoint", "Qwen/Qwen3-4B"],
    ["--sglang-cuda-graph-bs", "1", "2"], ["--rollout-max-response-len", "100"], ["--actor-num-nodes", "4"],
]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.permutations(KNOWN), st.integers(0, len(KNOWN)))
def test_any_options_in_any_order_make_a_graph_without_findings(
    tmp_path_factory: pytest.TempPathFactory, options: list[list[str]], count: int
) -> None:
    chosen = list(itertools.chain(["--rollout-batch-size", "8"], *options[:count]))
    made = import_slime(chosen)
    names = {word for word in chosen if word.startswith("--")}
    assert set(made.used) | set(made.ignored) == names
    assert not set(made.used) & set(made.ignored)
    priced(made, tmp_path_factory.mktemp("import"))


# --- the command -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["import", *arguments])


def test_the_graph_goes_to_stdout_and_the_account_to_stderr(tmp_path: Path) -> None:
    done = run("verl", str(VERL), "data.train_batch_size=256", "data.colour=red")
    assert done.exit_code == 0
    assert yaml.safe_load(done.stdout)["dims"]["group"] == 256
    assert "  data.train_batch_size: dims.group 256\n" in done.stderr
    assert "not known, so not in the graph: data.colour\n" in done.stderr
    assert "assumed\n" in done.stderr
    file = tmp_path / "mine.yaml"
    assert run("slime", "-o", str(file), "--", "--rollout-batch-size", "8").exit_code == 0
    audited = CliRunner().invoke(main, ["audit", str(file), "--naive"])
    assert audited.exit_code == 0
    assert "train.tokens" in audited.stdout
    refused = CliRunner().invoke(main, ["run", str(file)])
    assert refused.exit_code == 1
    assert "error[FG114] hop rollout (hops.peers.slime.rollout) only describes" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["verl", "VERL", "data.train_batch_size=many"],
            "data.train_batch_size is 'many'; give a whole number",
        ),
        (["verl", "VERL", "not an override"], "'not an override' is no override; write name=value"),
        (["verl", "VERL", "algorithm.use_kl_in_reward=perhaps"], "is 'perhaps'; give True or False"),
        (["verl", "EMPTY"], "no command in it runs verl.trainer.main_ppo"),
        (["verl", "LIST"], "holds no mapping of options"),
        (["verl", "BROKEN"], "is no YAML"),
        (["verl", "/no/such/config.yaml"], "does not exist"),
        (["slime", "--", "32"], "'32' belongs to no option"),
        (["slime", "--", "--lr", "1"], "--rollout-batch-size is missing"),
        (["slime", "--", "--rollout-batch-size", "0"], "--rollout-batch-size is 0; give a whole number"),
        (["slime", "/no/such/run.sh"], "No such file"),
    ],
)
def test_what_can_not_be_read_is_said_and_nothing_is_written(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    files = {
        "EMPTY": ("empty.sh", "echo hello\n"),
        "LIST": ("list.yaml", "[1]"),
        "BROKEN": ("broken.yaml", "{a: ["),
    }
    for name, text in files.values():
        (tmp_path / name).write_text(text)
    known = {"VERL": str(VERL)} | {key: str(tmp_path / name) for key, (name, _) in files.items()}
    done = run(arguments[0], "-o", str(tmp_path / "out.yaml"), *(known.get(a, a) for a in arguments[1:]))
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out.yaml").exists()
