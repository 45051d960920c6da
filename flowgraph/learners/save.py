"""Writing a Hugging Face model directory that is either whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgraph.models.quiet import no_progress_bar

# What a tokenizer may consist of, beside its weights-free neighbours that save_pretrained does not write.
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
)


def save_model(model: Any, model_dir: str, directory: str) -> None:
    """Write `model` and the tokenizer files of `model_dir` beside `directory`, then rename onto it.

    An existing directory of that name is moved aside first and removed last: a crash between the two renames
    leaves the old one as `.<name>.old-<pid>`. Raises OSError; a half-written sibling is removed.
    """
    target = Path(os.path.abspath(directory))
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (target.parent / f".{target.name}.{kind}-{os.getpid()}" for kind in ("new", "old"))
    try:
        with no_progress_bar():
            model.save_pretrained(fresh)
        _copy_tokenizer(Path(model_dir), fresh)
        _readable(fresh)
        if target.exists():
            os.replace(target, old)
        os.replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def saved_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that its files hold, by the model's own names; views."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *buffers.items())}


def assemble(model: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A model of the same kind and configuration with these tensors, by the model's own names, tied ones once."""
    with torch.device("meta"):
        made = type(model)(model.config)
    made.load_state_dict(tensors, strict=False, assign=True)
    made.tie_weights()
    lost = [name for name, tensor in made.state_dict().items() if tensor.is_meta]
    assert not lost, f"nothing was given for {lost}"
    if hasattr(model, "generation_config"):  # a critic has none
        made.generation_config = model.generation_config
    return made


def _readable(directory: Path) -> None:
    """safetensors files are made private; give them the mode of any new file."""
    mask = os.umask(0)
    os.umask(mask)
    for file in directory.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in _COPIED:
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
