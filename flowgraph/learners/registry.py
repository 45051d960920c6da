"""Which learners `owners.X.learner.use` may name, and the options of each. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from flowgraph.learners.protocol import Critic, Learner
from flowgraph.learners.ranks import ALONE, Ranks


class LoraOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Train W + alpha/rank · B·A in place of W, with A and B of that rank alone (LoRA, arXiv 2106.09685); needs peft.

    targets: names of linear layers, such as q_proj; None for all of them but the head
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "alpha"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of lora must be above 0, not {getattr(self, name):g}")
        if self.targets == ():
            raise ValueError(
                "targets of lora are none: name some, or leave targets out for all linear layers"
            )


class TorchOptions(msgspec.Struct, forbid_unknown_fields=True, tag_field="use", tag="torch"):
    """A Hugging Face causal model on torch, in one process or in several.

    lr: learning rate; left out for a frozen model
    pack: "tree" computes a prompt that rows share once, "packed" once a row, "padded" with padding besides; they differ
        in rounding
    max_tokens: the most tokens of one forward pass; a longer row stands alone, and so does a longer trajectory where
        the loss or its aggregation looks at all tokens of one
    optimizer: adamw, with `betas` and `eps`, or sgd without momentum; masters and moments are float32
    clip: the largest norm of the gradient
    warmup: steps in which the rate rises to lr
    schedule: of the rate afterwards: constant, or to 0 behind step `total_steps`, linear or as half a cosine
    checkpoint: keep no activation within a layer, and compute them again in the backward
    frozen: only scores, as a reference does: no gradients, no optimiser, no step
    lora: train a low-rank update instead of the matrices; the weights given and saved have it added
    weights_dtype: of the weights that an engine gets, where it computes in another dtype; None for `dtype`
    head: "value" makes it a critic, which gives a value a token in place of a log-probability
    """

    model: str
    lr: float | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    pack: Literal["tree", "packed", "padded"] = "tree"
    max_tokens: int = 4096
    optimizer: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = None
    temperature: float = 1.0
    checkpoint: bool = False
    frozen: bool = False
    lora: LoraOptions | None = None
    weights_dtype: Literal["bfloat16", "float32"] | None = None
    head: Literal["tokens", "value"] = "tokens"

    @property
    def given(self) -> str:
        """The dtype of the weights that it gives away."""
        return self.weights_dtype or self.dtype

    def __post_init__(self) -> None:
        for name in ("lr", "max_tokens", "clip", "temperature", "eps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value:g}")
        for name in ("warmup", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name):g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {list(self.betas)}")
        if self.lr is None and not self.frozen:
            raise ValueError("a learner that trains needs lr; give lr, or frozen: true where it only scores")
        if self.head == "value" and self.lora is not None:
            raise ValueError(
                "the head of a critic is new and is trained whole; leave out lora, or head: value"
            )
        self._check_unread()
        if self.schedule != "constant" and (self.total_steps or 0) <= self.warmup:
            raise ValueError(
                f"schedule {self.schedule} falls until step total_steps, which must be above warmup, {self.warmup}; "
                "give total_steps, such as run.steps"
            )

    def _check_unread(self) -> None:
        """Refuse an option that another one makes meaningless, if it is not as it is when left out."""
        unread: list[tuple[str, bool, tuple[str, ...]]] = [
            ("frozen: true", self.frozen, _TRAINING),
            ("optimizer: sgd", self.optimizer == "sgd", ("betas", "eps")),
            ("schedule: constant", self.schedule == "constant", ("total_steps",)),
            ("head: value", self.head == "value", ("temperature", "weights_dtype")),
        ]
        usual = {field.name: field.default for field in msgspec.structs.fields(type(self))}
        for what, holds, names in unread:
            for name in names if holds else ():
                if getattr(self, name) != usual[name]:
                    raise ValueError(f"{name} says nothing beside {what}; leave one of them out")


# What only a step reads.
_TRAINING = (
    *("lr", "optimizer", "betas", "eps", "weight_decay", "clip", "warmup", "schedule", "total_steps"),
    *("checkpoint", "lora"),
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
