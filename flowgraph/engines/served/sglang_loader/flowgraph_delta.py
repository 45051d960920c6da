"""Runs inside SGLang's scheduler: `--custom-weight-loader flowgraph_delta.load`, with this directory on its PYTHONPATH.

A rank keeps a copy of the whole set by its Hugging Face names, on the CPU: SGLang itself has but fused and sliced
tensors, which a delta doesn't know. A delta is applied to the copy, and the tensors that it changed are loaded into the
model from there. The price is the model's size in host memory for each rank.

An error that leaves `load` ends the server. So none does: the rank then doesn't write its answer, and has no version.

The environment of a server doesn't have flowgraph, and needs not: the modules on deltas are found by their place, and
want numpy and torch only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parents[2] / "weights"

_copy: dict[str, Any] = {}
_version: int | None = None  # of the copy and of the model; None: not known


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """named_tensors: one, u8 of a JSON object. version: that it leads to; rank: which byte of the file `answer`, of
    that inode, to set when the model has it; and either `directory`, of safetensors files, or `delta`, a packed one.
    """
    global _version
    try:
        order = json.loads(bytes(named_tensors[0][1].tolist()))
        at, _version = _version, None
        changed = _whole(order["directory"]) if "directory" in order else _changes(order["delta"], at)
        model.load_weights([(name, _copy[name]) for name in changed])
        with open(order["answer"], "r+b") as answer:
            if os.fstat(answer.fileno()).st_ino != order["inode"]:
                raise RuntimeError(f"nobody waits for version {order['version']} any more")
            answer.seek(order["rank"])
            answer.write(b"\1")
        _version = order["version"]
    except Exception:
        logging.getLogger(__name__).exception("the weights were not loaded")


def _whole(directory: str) -> list[str]:
    """→ the names of all tensors. They are copied: the files are memory that will be written to."""
    from safetensors.torch import load_file

    given: dict[str, Any] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        given |= load_file(file)
    for name, tensor in given.items():
        if name in _copy and _copy[name].shape == tensor.shape and _copy[name].dtype == tensor.dtype:
            _copy[name].copy_(tensor)
        else:
            _copy[name] = tensor.clone()
    for name in _copy.keys() - given.keys():
        del _copy[name]
    return list(given)


def _changes(path: str, at: int | None) -> list[str]:
    """→ the names of the tensors that changed."""
    delta = _weights("delta")
    change = delta.unpack(bytearray(Path(path).read_bytes()))
    delta.apply(change, _copy, at=-1 if at is None else at)
    return list(change.changes)


def _weights(module: str) -> Any:
    """A module of flowgraph.engines.weights, without flowgraph."""
    name = "flowgraph_weights"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, WEIGHTS / "__init__.py", submodule_search_locations=[str(WEIGHTS)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        sys.modules[name] = package
    return importlib.import_module(f"{name}.{module}")
