"""A model's numbers and its tensor table, read without torch and without a download."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from flowgraph.errors import ModelError
from flowgraph.models.configs import config_of, tensors_of
from flowgraph.models.directory import FLOATS, natural, read_json, read_tensors, weight_files
from flowgraph.models.sources import resolve

_ITEMSIZE = dict(FLOATS.values())

# Fact → the names that Hugging Face configs give it, the first that is there counts.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "max_position": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "moe_topk"),
    "index_top_k": ("index_topk",),
}
_NEEDED = ("layers", "hidden", "heads", "vocab", "max_position")


class TensorFact(msgspec.Struct, frozen=True):
    """One trainable tensor by its Hugging Face name; `dtype` is numpy's name (ml_dtypes: "bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


class ModelFacts(msgspec.Struct, frozen=True):
    """Numbers of a model that dims and prices come from. `experts` and `top_k` are None for a dense model.

    `moe_layers` of the layers have experts; `index_top_k` positions are what an indexer lets a token attend to.
    `tensors` are the trainable tensors in natural order of their names; a head tied to the embedding counts
    once, as the embedding.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    experts: int | None
    top_k: int | None
    tensors: tuple[TensorFact, ...]
    moe_layers: int | None = None
    index_top_k: int | None = None

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors: what one full copy of the weights takes."""
        return sum(tensor.bytes for tensor in self.tensors)


def facts(model: str) -> ModelFacts | None:
    """The facts of a built-in (always), a directory, a config, or a hub id in Hugging Face's cache (else None).

    Of a config without weights the tensors are those that transformers makes of it, which takes some seconds.

    Raises ModelError for an unknown name, an incomplete directory, or a config without the numbers.
    """
    source = resolve(model)
    if source.kind in ("builtin", "priced"):
        return _shipped(source.name)
    if source.kind == "class":
        return config_facts(config_of(source.name), source.name)
    path = Path(source.name)
    if source.kind == "config":
        return config_facts(read_json(path), str(path))
    if source.kind == "directory":
        bare = not any(file.is_file() for file in weight_files(path))
        return config_facts(read_json(path / "config.json"), str(path)) if bare else directory_facts(path)
    snapshot = _hub_snapshot(source.name)
    return directory_facts(snapshot) if snapshot else None


def directory_facts(path: Path) -> ModelFacts:
    """The facts of a model directory, from config.json and the headers of its safetensors files."""
    config = read_json(path / "config.json")
    missing = [file.name for file in weight_files(path) if not file.is_file()]
    tensors = {} if missing else read_tensors(path)
    if not tensors:
        lacks = ", ".join(missing) or "*.safetensors"
        raise ModelError(f"the model directory {path} lacks {lacks}", "save the model there as safetensors")
    if _get(config, "tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return ModelFacts(
        **_numbers(config, str(path / "config.json")),
        moe_layers=_moe_layers(tensors),
        tensors=tuple(TensorFact(name, shape, dtype) for name, (shape, dtype) in tensors.items()),
    )


def config_facts(config: dict[str, Any], said: str) -> ModelFacts:
    """The facts of a Hugging Face config alone. said: how it was given. Raises ModelError as `facts` does."""
    numbers = _numbers(config, said, [name for name in _NEEDED if name != "max_position"])
    numbers["max_position"] = numbers["max_position"] or 0  # which prices nothing
    tensors = tuple(TensorFact(*one) for one in tensors_of(config, said))
    return ModelFacts(**numbers, tensors=tensors, moe_layers=_moe_layers(t.name for t in tensors))


def _numbers(config: dict[str, Any], said: str, needed: Collection[str] = _NEEDED) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for fact, keys in _KEYS.items():
        values[fact] = next((value for key in keys if (value := _get(config, key)) is not None), None)
    missing = [_KEYS[fact][0] for fact in needed if values[fact] is None]
    if missing:
        raise ModelError(f"{said} has no {', '.join(missing)}", "give a causal language model")
    values["kv_heads"] = values["kv_heads"] or values["heads"]
    values["head_dim"] = values["head_dim"] or values["hidden"] // values["heads"]
    return values


def layers_with_experts(names: Iterable[str]) -> tuple[int, ...]:
    """The numbers of the layers that have experts, by the names of a model's tensors; none of a dense model."""
    found = (re.search(r"\.layers\.(\d+)\..*\bexperts\b", name) for name in names)
    return tuple(sorted({int(match[1]) for match in found if match}))


def _moe_layers(names: Iterable[str]) -> int | None:
    """How many layers have experts; None when it has none."""
    return len(layers_with_experts(names)) or None


def _get(config: dict[str, Any], key: str) -> Any:
    """A config value; models with several modalities keep the language model's under `text_config`."""
    value = config.get(key)
    text = config.get("text_config")
    return text.get(key) if value is None and isinstance(text, dict) else value


def _shipped(name: str) -> ModelFacts:
    """The facts that the package carries, so that a graph is priced before anything is downloaded.

    Its `tensors` map names to shapes; `*` in a name stands for the number of each layer, `3-60` for those numbers. Of a
    priced model, `hub` and `config` say whose they are and of which config of transformers they are made; of one that
    is made here, `config` is its config.json.
    """
    file = resources.files("flowgraph.models").joinpath(f"{name}.json")
    table = json.loads(file.read_text(encoding="utf-8"))
    dtype: str = table.pop("dtype")
    shapes: dict[str, tuple[int, ...]] = {}
    for pattern, shape in table.pop("tensors").items():
        shapes |= {name: tuple(shape) for name in _names(pattern, table["layers"])}
    table.pop("hub", None)
    table.pop("config", None)
    tensors = tuple(TensorFact(tensor, shapes[tensor], dtype) for tensor in sorted(shapes, key=natural))
    return ModelFacts(**table, tensors=tensors)


def _names(pattern: str, layers: int) -> list[str]:
    """The names that a pattern stands for."""
    span = re.search(r"(?<=\.)(\*|(\d+)-(\d+))(?=\.)", pattern)
    if span is None:
        return [pattern]
    numbers = range(layers) if span[1] == "*" else range(int(span[2]), int(span[3]) + 1)
    return [
        name
        for n in numbers
        for name in _names(pattern[: span.start()] + str(n) + pattern[span.end() :], layers)
    ]


def _hub_snapshot(name: str) -> Path | None:
    """The newest complete snapshot of a hub model in Hugging Face's cache; None when there is none."""
    import huggingface_hub

    config = huggingface_hub.try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    path = Path(config).parent
    files = weight_files(path)
    return path if files and all(file.is_file() for file in files) else None
