"""A model as the learner runs it: loaded, given a micro-batch, and refused where the packing does not fit it.

Shapes: B lines of L positions in one forward pass (B = 1 for a tree), T = B·L; U predicting positions; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgraph.models.quiet import no_progress_bar

from . import attention
from .head import TokenHead
from .pack import Micro, Packing, pack
from .protocol import Rows


def load_model(kind: Any, model_dir: str, dtype: torch.dtype, how: Packing, **config: Any) -> Any:
    """kind: one of transformers' Auto classes; config: what its configuration has besides that of the files."""
    implementation = attention.register() if how != "padded" else None  # None: the model's own default
    with no_progress_bar():
        model = kind.from_pretrained(model_dir, dtype=dtype, attn_implementation=implementation, **config)
    # Not train(): dropout would make the log-probabilities random, and the ratio of the first step not 1.
    return model.eval()


def model_inputs(micro: Micro, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of a model's forward pass."""
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(micro.token_T).view(micro.lines, -1),
        "position_ids": torch.from_numpy(micro.depth_T).view(micro.lines, -1),
        "use_cache": False,
    }
    # Padding stands on the right, where causal attention never looks: padded lines need no mask.
    return inputs | {"tree": attention.TreePlan(micro, dtype)} if micro.buckets else inputs


def probe(model: Any, forward: Callable[[Micro], Tensor], head: TokenHead, how: Packing) -> None:
    """Refuse a model that the packing does not fit, on two short rows that share a prompt.

    The second row's logits are computed by our backbone and head beside one first row, and by the model's own
    forward pass beside another. They differ if logits are more than hidden · headᵀ (caps, scales), or if rows
    leak into each other (recurrence, a model that ignores the plan).
    """
    prompt, length = 6, 12
    config = model.config.get_text_config()
    row_2L = np.arange(2 * length, dtype=np.int32).reshape(2, -1) % min(97, config.vocab_size - 1)
    row_2L[1, :prompt] = row_2L[0, :prompt]
    other_2L = row_2L.copy()
    other_2L[0, prompt:] = row_2L[0, prompt:][::-1]
    mask_2L = np.broadcast_to(np.arange(length) >= prompt, row_2L.shape)
    offsets = np.array([0, length, 2 * length])
    logits = []
    with torch.no_grad():
        for tokens_2L, whole in ((row_2L, False), (other_2L, True)):
            rows = Rows(tokens_2L.ravel(), offsets, mask_2L.ravel(), {})
            (micro,) = pack(rows, how, max_tokens=2 * length)
            if whole:
                out_TV = model(**model_inputs(micro, model.dtype)).logits.flatten(0, 1)
                logits_UV = out_TV[torch.from_numpy(micro.predictor_U)]
            else:
                logits_UV = head.logits(forward(micro))
            second = np.sort(micro.source_N.argsort()[length - prompt :])
            logits.append(logits_UV[micro.which_N[second]].double())
    error = float(torch.linalg.vector_norm(logits[0] - logits[1]) / torch.linalg.vector_norm(logits[1]))
    if not error < (2e-2 if model.dtype == torch.bfloat16 else 1e-4):
        raise NotImplementedError(
            f"{type(model).__name__} does not fit pack={how!r}: packed logits differ by {error:.1%} from its"
            " own (recurrent layers, or a head that is more than one matrix)"
        )
