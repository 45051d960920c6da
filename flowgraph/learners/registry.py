"""Which learners `owners.X.learner.use` may name, and the options of each. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from flowgraph.learners.protocol import Critic, Learner
from flowgraph.learners.ranks import ALONE, Ranks


class TorchOptions(msgspec.Struct, forbid_unknown_fields=True, tag_field="use", tag="torch"):
    """One torch process with AdamW.

    pack: "tree" computes a prompt that rows share once, "packed" once a row, "padded" with padding besides; they differ
        in rounding
    max_tokens: the most tokens of one forward pass; a longer trajectory stands alone
    weights_dtype: of the weights that an engine gets, where it computes in another dtype; None for `dtype`
    head: "value" makes it a critic, which gives a value a token in place of a log-probability
    """

    model: str
    lr: float
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    pack: Literal["tree", "packed", "padded"] = "tree"
    max_tokens: int = 4096
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: int = 0
    temperature: float = 1.0
    weights_dtype: Literal["bfloat16", "float32"] | None = None
    head: Literal["tokens", "value"] = "tokens"

    @property
    def given(self) -> str:
        """The dtype of the weights that it gives away."""
        return self.weights_dtype or self.dtype

    def __post_init__(self) -> None:
        for name in ("lr", "max_tokens", "clip", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name):g}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0, not {self.warmup}")
        if self.head == "value" and (self.temperature, self.weights_dtype) != (1.0, None):
            raise ValueError(
                "temperature and weights_dtype say nothing of a learner with head: value; leave them out"
            )


LearnerOptions = TorchOptions
LEARNERS: dict[str, type[LearnerOptions]] = {"torch": TorchOptions}


def create_learner(
    options: LearnerOptions, model_dir: str, *, threads: int, ranks: Ranks = ALONE
) -> Learner | Critic:
    """Load the learner, or this rank's part of it; every option but `model` and `head` is handed on by name.

    With several ranks all its methods are collective; `step` and `logprobs` take this rank's rows, `weights`
    gives all on the first rank and {} on the others, and the first writes what `save` saves.
    """
    from flowgraph.learners.torch import TorchLearner
    from flowgraph.learners.value import ValueLearner

    named = {
        name: getattr(options, name) for name in options.__struct_fields__ if name not in ("model", "head")
    }
    kind = ValueLearner if options.head == "value" else TorchLearner
    return kind(model_dir, threads=threads, ranks=ranks, **named)
