"""Whether weights are those of a model: every tensor by name, shape and dtype, said in one form by every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def unlike(name: str, tensor: Any, shape: Sequence[int], dtype: torch.dtype) -> str:
    """How a weight differs from the model's; empty when it does not."""
    if not isinstance(tensor, torch.Tensor):
        return f"{name!r} is a {type(tensor).__name__}, not a tensor"
    if (tensor.dtype, tuple(tensor.shape)) == (dtype, tuple(shape)):
        return ""
    return f"{name!r} is {tensor.dtype} {list(tensor.shape)}, the model's is {dtype} {list(shape)}"


def refuse(problems: Sequence[str]) -> None:
    """Raises ValueError naming the first of the problems; none is fine."""
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError("no weight was changed: " + "; ".join(problems[:5]) + more)
