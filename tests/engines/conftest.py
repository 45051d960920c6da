"""A tiny random Llama on disk, with a byte-level tokenizer: no network, no time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 260


def save_llama(where: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Two layers, 4 query and 2 key/value heads; weights large enough that its tokens aren't a coin toss."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(where)
    alphabet = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = {f"w{at}" for at in range(256, VOCABULARY)}
    tokenizer = Tokenizer(
        models.BPE(vocab=alphabet | {w: 256 + i for i, w in enumerate(sorted(words))}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(where / "tokenizer.json"))
    return where


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings and no EOS."""
    return save_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own."""
    return save_llama(tmp_path_factory.mktemp("untied"), tied=False)


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
