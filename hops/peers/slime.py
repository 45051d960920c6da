"""slime at commit 624b824a as contracts: what its engines answer, and what its rollout manager packs for the trainers.

dtypes are those of slime/observability/rollout_data_utils.py (`tensorize_rollout_data_for_training`); keys those of
slime/ray/rollout.py (`_convert_samples_to_train_data`, `_split_train_data_by_dp`). Nothing here runs. The manager is
the driver. Ref and teacher log-probabilities are computed inside the trainers, so they cross no seam.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from jaxtyping import Float32, Int32, Int64

from flowgraph import Array, Below, Engine, Json, Latest, Learner, Rows, Tensors, Version, effect, fold, hop

Value = Annotated[Any, Json(mean=256, max=65536)]


class Cursor(msgspec.Struct):
    """Where the data source stands."""

    at: int = 0


class Prompt(NamedTuple):
    """A row of the prompt data (slime/utils/types.py: Sample.prompt, Sample.label). Their bytes are assumed."""

    prompt: Value
    label: Value


class Prompts(NamedTuple):
    group: Annotated[list[Prompt], Rows("group")]


@fold(source="group", lifetime="step", described="slime's data source, in the rollout manager")
def dataset(state: Cursor) -> Prompts:
    """Rows of --prompt-data."""


class Sampled(NamedTuple):
    """A Sample, as its reward is known (slime/rollout/sglang_rollout.py: generate, then the reward function)."""

    tokens: Int64[Array, "token"]
    loss_masks: Int32[Array, "leaf response"]
    rollout_log_probs: Float32[Array, "leaf response"]
    response_lengths: Int64[Array, "leaf"]
    raw_reward: Float32[Array, "leaf"]
    truncated: Int64[Array, "leaf"]
    rollout_mask_sums: Float32[Array, "leaf"]


class Routed(NamedTuple):
    """A Sample with the experts of each token: int32 of all layers, decoded from base64 (`decode_int32_meta_array`)."""

    tokens: Int64[Array, "token"]
    loss_masks: Int32[Array, "leaf response"]
    rollout_log_probs: Float32[Array, "leaf response"]
    response_lengths: Int64[Array, "leaf"]
    raw_reward: Float32[Array, "leaf"]
    truncated: Int64[Array, "leaf"]
    rollout_mask_sums: Float32[Array, "leaf"]
    rollout_routed_experts: Annotated[Int32[Array, "token layers top_k"], Below("experts")]


SGLANG = "SGLang answers the rollout manager in JSON"


@effect(uses=Engine, owner="rollout", lifetime="step", described=SGLANG)
def rollout(prompt: Value, label: Value, *, engine: Engine) -> Sampled:
    """One response, with its tokens' log-probabilities."""


@effect(uses=Engine, owner="rollout", lifetime="step", described=SGLANG)
def rollout_routed(prompt: Value, label: Value, *, engine: Engine) -> Routed:
    """One response, with log-probabilities and routed experts."""


@hop(owner="driver", lifetime="step", described="slime's rollout manager")
def rewards(
    raw_reward: Float32[Array, "leaf"],
) -> Annotated[Float32[Array, "leaf"], "normalised within its group"]:
    """`_post_process_rewards`: rewards less their group's mean, over its deviation."""


class Trained(NamedTuple):
    """Sent to the engines by the trainers themselves, past the manager."""

    weights: Annotated[dict[str, Any], Tensors()]


@effect(
    uses=Learner, owner="actor", lifetime="version", described="slime's trainers, which get it by ray.put"
)
def train(
    tokens: Int64[Array, "token"],
    loss_masks: Int32[Array, "leaf response"],
    rollout_log_probs: Float32[Array, "leaf response"],
    response_lengths: Int64[Array, "leaf"],
    rewards: Float32[Array, "leaf"],
    raw_reward: Float32[Array, "leaf"],
    truncated: Int64[Array, "leaf"],
    rollout_mask_sums: Float32[Array, "leaf"],
    *,
    learner: Learner,
) -> Trained:
    """Log-probabilities, advantages and the update, all in the trainers."""


@effect(
    uses=Learner, owner="actor", lifetime="version", described="slime's trainers, which get it by ray.put"
)
def train_routed(
    tokens: Int64[Array, "token"],
    loss_masks: Int32[Array, "leaf response"],
    rollout_log_probs: Float32[Array, "leaf response"],
    response_lengths: Int64[Array, "leaf"],
    rewards: Float32[Array, "leaf"],
    raw_reward: Float32[Array, "leaf"],
    truncated: Int64[Array, "leaf"],
    rollout_mask_sums: Float32[Array, "leaf"],
    rollout_routed_experts: Int32[Array, "token layers top_k"],
    *,
    learner: Learner,
) -> Trained:
    """`train` with the experts that rollout chose."""


@effect(uses=Engine, owner="rollout", lifetime="version", described="slime's trainers, past the manager")
def update_weights(
    weights: Annotated[dict[str, Any], Tensors()], batch_id: Int64[Array, ""], *, engine: Engine
) -> Annotated[Version, Latest(initial=0)]:
    """Buckets of weights, or files of them."""
