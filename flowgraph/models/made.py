"""Small models with random weights, made here: nothing is downloaded, and every machine makes the same bits.

They are for trying what only a model with experts has, such as replay of its routing; a trained one would not fit.
No torch: the process that makes one may be the driver.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from flowgraph.models.facts import facts

# Raise it when `make` writes something else: directories of another version are not used.
MADE = 1

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # then a token for each byte
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def directory_name(name: str) -> str:
    """Holds all that the content of a made model depends on."""
    return f"{name}-{hashlib.sha256(_text(name).encode()).hexdigest()[:8]}-v{MADE}"


def make(name: str, out: Path) -> None:
    """Write config, weights (bfloat16) and a tokenizer of bytes into the existing empty directory `out`."""
    config: dict[str, Any] = json.loads(_text(name))["config"]
    ends = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    tokens = {"eos_token": SPECIAL[ends["eos_token_id"]], "pad_token": SPECIAL[ends["pad_token_id"]]}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
        **tokens,
    }
    for file, value in (
        ("config.json", config),
        ("generation_config.json", ends),
        ("tokenizer_config.json", tokenizer),
    ):
        (out / file).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(out / "tokenizer.json")
    _write_weights(name, float(config["initializer_range"]), out / "model.safetensors")


def _text(name: str) -> str:
    return resources.files("flowgraph.models").joinpath(f"{name}.json").read_text(encoding="utf-8")


def _write_weights(name: str, std: float, path: Path) -> None:
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    table = facts(name)
    assert table is not None
    random = np.random.RandomState(0)  # whose stream numpy promises never to change
    weights = {}
    for tensor in table.tensors:
        norm = tensor.name.endswith("norm.weight")
        values = np.ones(tensor.shape) if norm else std * random.standard_normal(tensor.shape)
        weights[tensor.name] = values.astype(np.float32).astype(bfloat16)
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod((path.parent / "config.json").stat().st_mode)  # save_file gives 0600; a cache may be shared


def _write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: id for id, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(path))
