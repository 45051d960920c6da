"""Named sets of tensors in shared memory. The only module of the runtime that imports torch, and only when called."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from flowgraph.errors import PayloadError
from flowgraph.plan.layout import tensor_bytes
from flowgraph.plan.plan import TensorSlot


def _views(table: Sequence[TensorSlot], view: memoryview, start: int) -> dict[str, Any]:
    import torch

    out = {}
    for slot in table:
        count = 1
        for n in slot.shape:
            count *= n
        out[slot.name] = torch.frombuffer(
            view, dtype=getattr(torch, slot.dtype), count=count, offset=start
        ).view(slot.shape)
        start += tensor_bytes(slot)
    return out


def write_tensors(
    table: Sequence[TensorSlot], tensors: Mapping[str, Any], view: memoryview, start: int
) -> None:
    """Copy a set into shared memory. Raises PayloadError unless it has exactly the table's names, shapes and dtypes."""
    names = {slot.name for slot in table}
    if odd := sorted(names ^ set(tensors)):
        state = "is missing" if odd[0] in names else "is not in the model"
        raise PayloadError(
            f"tensor {odd[0]} {state} ({len(odd)} names differ)", "train the model that the engine serves"
        )
    for name, target in _views(table, view, start).items():
        source = tensors[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise PayloadError(
                f"tensor {name} is {source.dtype}{list(source.shape)}, "
                f"and the plan has {target.dtype}{list(target.shape)}",
                "give engine and learner the same model and dtype",
            )
        target.copy_(source.detach())


def read_tensors(table: Sequence[TensorSlot], view: memoryview, start: int) -> dict[str, Any]:
    """Views of the set, without a copy. They are valid while the block lives.

    Their pages are mapped to be read: the kernel ends a process that writes to them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return _views(table, view, start)
