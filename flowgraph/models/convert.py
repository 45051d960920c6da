"""From a GGUF file of a Llama-architecture model to a Hugging Face directory in bfloat16.

Read with the `gguf` library and numpy. transformers reads GGUF files too, but it needs accelerate for that,
keeps the weights packed and then refuses to save them, and its tokenizer loses the split of digits (see
`_tokenizer`). No torch: the process that converts may be the driver.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgraph.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Raise it when the converter writes something else: directories of another version are not used.
CONVERSION = 1

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # gguf.TokenType.CONTROL: a special token


def convert(gguf_file: Path, out: Path, on_tensor: Callable[[int], None] = lambda total: None) -> None:
    """Write config, weights (bfloat16) and tokenizer of `gguf_file` into the existing empty directory `out`.

    `on_tensor(total)` is called once per tensor. Raises ModelError when the file is no Llama model with the
    SmolLM tokenizer.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    keys = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    found = tuple(meta.get(key) for key in keys)
    if found != ("llama", "gpt2", "smollm"):
        raise ModelError(
            f"{gguf_file.name} has architecture, tokenizer and pre-tokenizer {found}, "
            "but only ('llama', 'gpt2', 'smollm') can be converted",
            "convert it with llama.cpp's or transformers' tools and give the directory",
        )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(out / "config.json", _config(meta, tied=tied))
    _write_json(out / "generation_config.json", _special_ids(meta))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(meta))
    _tokenizer(meta).save(str(out / "tokenizer.json"))
    _write_weights(reader, meta, out / "model.safetensors", on_tensor)


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor: blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight."""
    parts = name.split(".")
    try:
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
        return f"{_TOP[parts[0]]}.{parts[1]}"
    except (KeyError, IndexError):
        raise ModelError(f"unknown tensor {name!r} in the GGUF file") from None


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k: [head, dim/2, 2] → [head, 2, dim/2], flattened.

    llama.cpp rotates neighbouring rows, Hugging Face the two halves of a head (its convert_hf_to_gguf.py,
    LlamaModel.permute).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_weights(reader: Any, meta: dict[str, Any], path: Path, on_tensor: Callable[[int], None]) -> None:
    from gguf.quants import dequantize
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    heads = {
        "attn_q": int(meta["llama.attention.head_count"]),
        "attn_k": int(meta["llama.attention.head_count_kv"]),
    }
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)  # float32, [out, in]
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        weights[hf_name(tensor.name)] = np.ascontiguousarray(weight.astype(bfloat16))
        on_tensor(len(reader.tensors))
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod((path.parent / "config.json").stat().st_mode)  # save_file gives 0600; a cache may be shared


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = int(meta["llama.embedding_length"]), int(meta["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": int(meta["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": int(meta.get("llama.rope.dimension_count", hidden // heads)),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": _short(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short(meta["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **_special_ids(meta),
    }


def _short(value: float) -> float:
    """A float32 as the shortest decimal that gives it: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {key: meta.get(f"tokenizer.ggml.{name}_token_id") for key, name in keys.items()}
    return {key: int(value) for key, value in ids.items() if value is not None}


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {key: meta.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(meta["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
    }
    config |= {key: meta["tokenizer.ggml.tokens"][id] for key, id in ids.items() if id is not None}
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE as SmolLM2 publishes it: every digit is a piece of its own *before* GPT-2's split.

    The order matters where space meets a digit: "\\n\\n7" is then "\\n\\n", "7", and not "\\n", "\\n", "7".
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
