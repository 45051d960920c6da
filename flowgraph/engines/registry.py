"""Which engines `owners.X.engine.use` may name, and the options of each. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from flowgraph.engines.protocol import Engine


class TransformersOptions(msgspec.Struct, forbid_unknown_fields=True, tag_field="use", tag="transformers"):
    """The embedded engine. slots: requests decoded at once, a fixed number, because bits depend on it."""

    model: str
    slots: int = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError("slots must be at least 1")


EngineOptions = TransformersOptions
ENGINES = ("transformers",)


def create_engine(options: EngineOptions, model_dir: str, *, context: int, threads: int) -> Engine:
    """Load the engine. context: the longest prompt plus the longest response, in tokens."""
    from flowgraph.engines.transformers import TransformersEngine

    return TransformersEngine(
        model_dir, slots=options.slots, context=context, dtype=options.dtype, threads=threads
    )
