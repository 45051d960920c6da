"""Models that engines serve, and engines that serve them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import SLOTS, Running
from served_model import ServedModel
from tiny_llama import SIZES, save_model
from transformers import LlamaConfig

from flowgraph.engines.registry import EngineOptions, SglangOptions, TransformersOptions


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings and no EOS."""
    return save_model(tmp_path_factory.mktemp("tiny"), LlamaConfig(**SIZES, tie_word_embeddings=True))


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Saves a model of another config class; `more` overrides its settings."""
    return lambda kind, **more: save_model(tmp_path, kind(**SIZES | more))


@pytest.fixture
def tiny_with_eos(tiny: Path, tmp_path: Path) -> Callable[[int | list[int]], Path]:
    """The same model, where the given ids end a response."""

    def make(eos: int | list[int]) -> Path:
        where = shutil.copytree(tiny, tmp_path / f"eos-{eos}")
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((where / name).read_text())
            (where / name).write_text(json.dumps(settings | {"eos_token_id": eos}))
        return where

    return make


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel(tmp_path_factory.mktemp("served"))


SGLANG = "FLOWGRAPH_SGLANG_PYTHON"


@pytest.fixture(
    scope="session",
    params=["embedded", "one server", "two servers", pytest.param("sglang", marks=pytest.mark.sglang)],
)
def running(
    request: pytest.FixtureRequest, served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Each engine in turn, started once for all its tests."""
    model, python = str(served_model.directory), os.environ.get(SGLANG)
    options: EngineOptions
    if request.param == "sglang":
        assert python
        options = SglangOptions(model, slots=SLOTS, dtype="float32", device="cpu", python=python)
    else:
        processes = ["embedded", "one server", "two servers"].index(request.param)
        options = TransformersOptions(model, slots=SLOTS, dtype="float32", processes=processes)
    running = Running(request.param, options, served_model, tmp_path_factory.mktemp("logs"))
    yield running
    running.close()
