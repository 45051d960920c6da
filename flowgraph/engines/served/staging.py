"""One copy of the newest weights beside the servers, in the form that they are handed, until the next ones come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flowgraph.engines.weights.delta import Delta, encode, pack
from flowgraph.engines.weights.layout import Entry
from flowgraph.engines.weights.stage import Stage


class Staged:
    """Weights of one version, as a directory that a server can load and as tensors. delta: from the version before."""

    def __init__(
        self,
        directory: str,
        version: int,
        nbytes: int,
        held: Mapping[str, torch.Tensor] | None = None,
        delta: Delta | None = None,
    ) -> None:
        self.directory, self.version, self.nbytes, self.delta = directory, version, nbytes, delta
        self._held = held

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        if self._held is not None:
            return self._held
        out: dict[str, torch.Tensor] = {}
        for file in sorted(Path(self.directory).glob("*.safetensors")):
            out |= load_file(file)
        return out

    @cached_property
    def packed(self) -> bytearray:
        """The delta as it is sent."""
        assert self.delta is not None
        return pack(self.delta)


def initial(model_dir: str) -> Staged:
    """Version 0: the model's own files."""
    return Staged(model_dir, 0, sum(f.stat().st_size for f in Path(model_dir).glob("*.safetensors")))


class Staging:
    """Takes each version's weights, checks them against the model, and keeps the last ones.

    dtype: of the engine; where: the directory in which the memory gets a name; deltas: whether to find what changed
    """

    def __init__(self, model_dir: str, dtype: str, where: str, *, deltas: bool = False) -> None:
        self._shapes = shapes(model_dir)
        self._tied = _tied(model_dir)
        self._dtype, self._where, self._deltas = getattr(torch, dtype), where, deltas
        self._stage: Stage | None = None

    def __call__(self, weights: Mapping[str, Any], version: int) -> Staged:
        """Raises ValueError naming what does not fit the model; the weights staged before are then untouched."""
        _check(self._shapes, self._tied, self._dtype, weights)
        if self._stage is None:
            table = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]
            self._stage = Stage(table, self._where)
        stage, delta = self._stage, None
        if self._deltas and stage.version is not None:
            delta = encode(stage.tensors, weights, base=stage.version, version=version)
        stage.write(weights, version)
        return Staged(stage.directory, version, stage.nbytes, stage.tensors, delta)

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()


def shapes(model_dir: str) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in a model's files; no tensor is read."""
    out: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(model_dir).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            out |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    return out


def _tied(model_dir: str) -> bool:
    config = json.loads(Path(model_dir, "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))


def _check(
    want: Mapping[str, tuple[int, ...]], tied: bool, dtype: torch.dtype, given: Mapping[str, Any]
) -> None:
    problems = []
    heads = {"lm_head.weight"} if tied else set()  # a tied head may be given, and need not be
    for name in sorted(want.keys() - given.keys() - heads):
        problems.append(f"{name!r} is missing")
    for name, tensor in given.items():
        if name not in want:
            if name not in heads:
                problems.append(f"{name!r} is no weight of this model")
        elif (tensor.dtype, tuple(tensor.shape)) != (dtype, want[name]):
            have = f"{tensor.dtype} {list(tensor.shape)}"
            problems.append(f"{name!r} is {have}, the model's is {dtype} {list(want[name])}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError("no weight was changed: " + "; ".join(problems[:5]) + more)
