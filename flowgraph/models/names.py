"""The weights of a loaded model under the names of its files, as views of the memory that it computes with.

transformers fuses the experts of a layer while it loads them: `experts.3.gate_proj.weight` and `…up_proj.weight` become
rows of `experts.gate_up_proj`. What crosses from a learner to an engine goes by the names of the files, which
servers and plans know too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import Tensor

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def by_file_name(tensors: Mapping[str, Tensor], names: Set[str]) -> dict[str, Tensor]:
    """The same tensors under the names of a model's files, where those have its experts one by one.

    tensors: by the names that the model has for them; names: of its files. One that no file names keeps its own name.
    Nothing is copied: gate_up_proj is [expert, 2·inner, hidden], gate above up, and down_proj [expert, hidden, inner].
    """
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = {} if name in names else dict(_experts(name, tensor.detach()))
        out |= parts if parts and names >= parts.keys() else {name: tensor.detach()}
    return out


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.endswith(GATE_UP):
        inner = tensor.shape[1] // 2
        pieces = [("gate_proj", tensor[:, :inner]), ("up_proj", tensor[:, inner:])]
    elif name.endswith(DOWN):
        pieces = [("down_proj", tensor)]
    else:
        return
    layer = name.rpartition(".")[0]
    for kind, of_experts in pieces:
        for expert, weight in enumerate(of_experts):
            yield f"{layer}.{expert}.{kind}.weight", weight


def weights_of(model: Any, names: Set[str]) -> dict[str, Tensor]:
    """A model's parameters, tied ones once, and the buffers that its files hold, by the names of its files."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in names}
    return by_file_name(dict(model.named_parameters()) | buffers, names)
