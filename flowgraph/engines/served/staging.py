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
from flowgraph.engines.weights.fit import refuse, unlike
from flowgraph.engines.weights.layout import Entry
from flowgraph.engines.weights.stage import Stage

HEAD = "lm_head.weight"


class Staged:
    """Weights of one version, as a directory that a server can load and as tensors. delta: from the version before.

    dtype: what a server makes of the directory's floating-point tensors; None where they are as they are served
    """

    def __init__(
        self,
        directory: str,
        version: int,
        nbytes: int,
        held: Mapping[str, torch.Tensor] | None = None,
        delta: Delta | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.directory, self.version, self.nbytes, self.delta = directory, version, nbytes, delta
        self._held, self._dtype = held, dtype

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        if self._held is not None:
            return self._held
        out: dict[str, torch.Tensor] = {}
        for file in sorted(Path(self.directory).glob("*.safetensors")):
            out |= load_file(file)
        return {n: t.to(self._dtype) if t.is_floating_point() else t for n, t in out.items()}

    @cached_property
    def packed(self) -> bytearray:
        """The delta as it is sent."""
        assert self.delta is not None
        return pack(self.delta)


def initial(model_dir: str, dtype: str) -> Staged:
    """Version 0: the model's own files, whose dtype need not be the engine's."""
    nbytes = sum(f.stat().st_size for f in Path(model_dir).glob("*.safetensors"))
    return Staged(model_dir, 0, nbytes, dtype=getattr(torch, dtype))


class Staging:
    """Takes each version's weights, checks them against the model, and keeps the last ones.

    dtype: of the engine; where: the directory in which the memory gets a name; deltas: whether to find what changed
    """

    def __init__(self, model_dir: str, dtype: str, where: str, *, deltas: bool = False) -> None:
        self._shapes = shapes(model_dir)
        self._twin = _twin(model_dir, self._shapes)
        self._dtype, self._where, self._deltas = getattr(torch, dtype), where, deltas
        self._stage: Stage | None = None

    def __call__(self, weights: Mapping[str, Any], version: int) -> Staged:
        """Raises ValueError naming what does not fit the model; the weights staged before are then untouched."""
        weights = _own(weights, self._shapes, self._twin, self._dtype)
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


def _twin(model_dir: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The weight that a tied head shares: of those in the files, the one with a row for each token."""
    config = json.loads(Path(model_dir, "config.json").read_text())
    tied = config.get("tie_word_embeddings", False) and HEAD not in shapes
    rows = (
        name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == config.get("vocab_size")
    )
    return next(rows, None) if tied else None


def _own(
    given: Mapping[str, Any], want: Mapping[str, tuple[int, ...]], twin: str | None, dtype: torch.dtype
) -> dict[str, Any]:
    """The weights under the names of the model's files. A tied head may be given by either name, or by both."""
    own, problems = dict(given), []
    if twin is not None and HEAD in own:
        head = own.pop(HEAD)
        if twin not in own:
            own[twin] = head
        elif problem := unlike(HEAD, head, want[twin], dtype):
            problems.append(problem)
        elif not unlike(twin, own[twin], want[twin], dtype) and not torch.equal(head, own[twin]):
            problems.append(f"{HEAD!r} differs from {twin!r}, to which it is tied")
    for name in sorted(want.keys() - own.keys()):
        problems.append(f"{name!r} is missing")
    for name, tensor in own.items():
        if name not in want:
            problems.append(f"{name!r} is no weight of this model")
        elif problem := unlike(name, tensor, want[name], dtype):
            problems.append(problem)
    refuse(problems)
    return own
