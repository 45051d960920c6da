"""Tiny random models with experts, and what transformers' own router chooses in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import SIZES, save_model
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedConfig, Qwen3MoeConfig

from flowgraph.models.quiet import no_progress_bar

COMMON = SIZES | {"intermediate_size": 96, "max_position_embeddings": 512, "tie_word_embeddings": False}
# Eight experts of which two are chosen, in every layer.
QWEN: dict[str, Any] = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}
QWEN |= {"moe_intermediate_size": 32, "norm_topk_prob": True}
# 300 experts, which need more than a byte, of which four are chosen; none in the first layer.
GLM: dict[str, Any] = {"num_hidden_layers": 4, "n_routed_experts": 300, "num_experts_per_tok": 4}
GLM |= {"moe_intermediate_size": 16, "norm_topk_prob": True, "first_k_dense_replace": 1}
GLM |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}


def config(kind: str, **more: Any) -> PreTrainedConfig:
    if kind == "qwen":
        return Qwen3MoeConfig(**COMMON | QWEN | more)
    return Glm4MoeConfig(**COMMON | GLM | more)


def save_experts(where: Path, kind: str, **more: Any) -> Path:
    where.mkdir()
    (where / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return save_model(where, config(kind, **more))


def routing(model_dir: Path, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """i64[tokens, layers, top_k] of one forward in fp32, ascending; 0 in layers without experts."""
    model = _loaded(model_dir)
    config = model.config
    chosen = np.zeros((len(ids), config.num_hidden_layers, config.num_experts_per_tok), np.int64)

    def take(layer: int, arguments: tuple[Any, ...]) -> None:
        chosen[:, layer] = arguments[1].reshape(len(ids), -1).sort(dim=-1).values.numpy()

    with ExitStack() as hooks, torch.no_grad():
        for at, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "experts"):
                hook = layer.mlp.experts.register_forward_pre_hook(lambda _, given, at=at: take(at, given))
                hooks.enter_context(hook)
        model(torch.tensor([list(ids)]))
    return chosen


@functools.lru_cache(maxsize=4)
def _loaded(model_dir: Path) -> Any:
    with no_progress_bar():
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
