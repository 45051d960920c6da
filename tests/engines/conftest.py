"""A tiny random Llama on disk, with a byte-level tokenizer: no network, no time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

VOCABULARY = 260


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that its tokens aren't a coin toss
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_model(where: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(where)
    alphabet = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    others = {f"<{at}>": at for at in range(256, VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | others, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(where / "tokenizer.json"))
    return where


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
