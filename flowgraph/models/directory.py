"""A model directory in Hugging Face's layout: which files it must have, its digest, and its tensor table."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

from flowgraph.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# safetensors' dtype names → numpy's (with ml_dtypes), and bytes per element. Integers and booleans are left
# out: tensors of those types are buffers or packed weights, which nothing trains.
FLOATS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}


def check_directory(path: Path) -> None:
    """Raise ModelError, naming what is missing, unless `path` holds config, tokenizer and all weights."""
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    missing = [name for name in names if not (path / name).is_file()]
    files = weight_files(path)
    missing += [file.name for file in files if not file.is_file()] or ([] if files else ["*.safetensors"])
    if missing:
        raise ModelError(
            f"the model directory {path} lacks {', '.join(missing)}",
            "save model and tokenizer there with save_pretrained (safetensors, fast tokenizer)",
        )


def weight_files(path: Path) -> list[Path]:
    """The weight files that the directory should have: its index's shards, else its *.safetensors files."""
    if (path / WEIGHTS).is_file():  # transformers prefers it over an index, too
        return [path / WEIGHTS]
    if (path / INDEX).is_file():
        return [path / name for name in sorted(set(read_json(path / INDEX)["weight_map"].values()))]
    return sorted(path.glob("*.safetensors"))


def digest(path: Path) -> str:
    """SHA-256 in hex of the weights: of the single file, or of the index and then each shard by name."""
    files = weight_files(path)
    if len(files) == 1 and files[0].name == WEIGHTS:
        with files[0].open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    total = hashlib.sha256()
    for file in [path / INDEX, *files] if (path / INDEX).is_file() else files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def read_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name → (shape, numpy dtype name) of every floating-point tensor, in natural order (layer 2 before 10).

    Reads the headers only. Raises ModelError for a file that is truncated or no safetensors file.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in weight_files(path):
        for name, entry in read_header(file).items():
            if entry["dtype"] in FLOATS:
                found[name] = (tuple(entry["shape"]), FLOATS[entry["dtype"]][0])
    return {name: found[name] for name in sorted(found, key=natural)}


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: name → {dtype, shape, data_offsets}.

    The format is 8 bytes of little-endian length, that much JSON, then the data; the last offset must be the
    file's end, which finds a copy that was cut short.
    """
    size = file.stat().st_size
    bad = ModelError(f"{file} is no complete safetensors file", "copy or download it again")
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise bad
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise bad from None
    if 8 + length + end != size:
        raise bad
    return header


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError when it is no JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON file: {error}", "copy or download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} should hold a JSON object", "copy or download it again")
    return value


def natural(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
