"""The parts of a model: its head, and its decoder layers, which are gathered one at a time or keep no activations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def head_of(model: Any) -> torch.nn.Module:
    """The layer that a backbone's hidden states go through: a causal model's logits, a critic's one number."""
    head: torch.nn.Module = model.get_output_embeddings() or model.score
    return head


def layers_of(model: Any) -> torch.nn.ModuleList:
    """Those that a forward runs one after the other. Raises NotImplementedError for a model without such a list."""
    count = int(model.config.get_text_config().num_hidden_layers)
    lists = [m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if not lists:
        raise NotImplementedError(f"{type(model).__name__} has no list of its {count} layers")
    return lists[0]


def compute_again(layers: Iterable[torch.nn.Module]) -> None:
    """Keep only what enters each layer; its backward runs the forward again (Chen et al. 2016, arXiv 1604.06174).

    The learner has no dropout, so both forwards are the same, if what was put into the layer's choices is still
    put in then. transformers' own switch does nothing outside of training mode.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
