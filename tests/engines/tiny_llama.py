"""A tiny random Llama on disk, with a byte-level tokenizer: no network, no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig

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
