"""verl 0.9.1 as contracts: the columns of its DataProto, in the dtypes that it gives them. Nothing here runs.

A row of verl is padded to data.max_prompt_length + data.max_response_length; here it is as long as it is, and
`audit --naive` prices the padding. Every worker call takes the batch as it is at that time
(verl/trainer/ppo/ray_trainer.py: `batch.to_tensordict()` in `_compute_old_log_prob`, `_compute_ref_log_prob`,
`_compute_values`, `_update_actor` and `_update_critic`), which is why they read columns that they make no use of.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from jaxtyping import Float32, Int32, Int64

from flowgraph import (
    Array,
    Engine,
    Json,
    Latest,
    Learner,
    Rows,
    Scalars,
    Tensors,
    Text,
    Version,
    effect,
    fold,
    hop,
)

Ids = Int64[Array, "token"]
PromptIds = Int64[Array, "leaf prompt"]
ResponseIds = Int64[Array, "leaf response"]
OfResponse = Float32[Array, "leaf response"]
Source = Annotated[str, Text(mean=16, max=256)]
Value = Annotated[Any, Json(mean=256, max=65536)]
Uid = Annotated[str, Text(mean=36, max=36)]
Sources = Annotated[list[str], Text("leaf", mean=16, max=256)]  # of a batch, one a row
Objects = Annotated[list[Any], Json("leaf", mean=256, max=65536)]
Uids = Annotated[list[str], Text("leaf", mean=36, max=36)]


class Cursor(msgspec.Struct):
    """Where the dataloader stands."""

    at: int = 0


class Prompt(NamedTuple):
    """A row of the dataset (verl/utils/dataset/rl_dataset.py: RLHFDataset.__getitem__): objects, no tensors.

    uid: str(uuid4()), 36 bytes (verl/trainer/ppo/ray_trainer.py: fit)
    """

    raw_prompt: Value
    uid: Uid
    data_source: Source
    reward_model: Value
    extra_info: Value


class Prompts(NamedTuple):
    group: Annotated[list[Prompt], Rows("group")]


@fold(source="group", lifetime="step", described="RLHFDataset and its dataloader, in the driver's process")
def dataset(state: Cursor) -> Prompts:
    """Rows of a parquet file. Their sizes in bytes are assumed: a chat or an object of 256 bytes, a name of 16."""


class Rollout(NamedTuple):
    """What AgentLoopWorker returns (verl/experimental/agent_loop/agent_loop.py: _postprocess).

    Ids and masks are torch.int64; rm_scores is as wide as the response, with the score at its last token.
    """

    prompts: PromptIds
    responses: ResponseIds
    response_mask: ResponseIds
    input_ids: Ids
    attention_mask: Ids
    position_ids: Ids
    num_turns: Int32[Array, "leaf"]
    rm_scores: OfResponse


class RolloutLogProbs(NamedTuple):
    """Rollout with rollout.calculate_log_probs: rollout_log_probs besides, torch.float32."""

    prompts: PromptIds
    responses: ResponseIds
    response_mask: ResponseIds
    input_ids: Ids
    attention_mask: Ids
    position_ids: Ids
    num_turns: Int32[Array, "leaf"]
    rm_scores: OfResponse
    rollout_log_probs: OfResponse


AGENT_LOOP = "AgentLoopWorker answers through Ray, verl/experimental/agent_loop/agent_loop.py"


@effect(uses=Engine, owner="rollout", lifetime="step", described=AGENT_LOOP)
def rollout(
    raw_prompt: Value,
    uid: Uid,
    data_source: Source,
    reward_model: Value,
    extra_info: Value,
    *,
    engine: Engine,
) -> Rollout:
    """One trajectory and its score. The dataset's columns go with it (`_get_gen_batch`): its reward reads them."""


@effect(uses=Engine, owner="rollout", lifetime="step", described=AGENT_LOOP)
def rollout_log_probs(
    raw_prompt: Value,
    uid: Uid,
    data_source: Source,
    reward_model: Value,
    extra_info: Value,
    *,
    engine: Engine,
) -> RolloutLogProbs:
    """`rollout` with the log-probabilities of the engine."""


class OldLogProbs(NamedTuple):
    """float32, by `.float()` (verl/trainer/ppo/ray_trainer.py: _compute_old_log_prob)."""

    old_log_probs: OfResponse
    entropys: OfResponse


@effect(
    uses=Learner,
    owner="actor",
    lifetime="step",
    described="actor_rollout_wg.compute_log_prob, a DataProto through Ray",
)
def old_log_prob(
    prompts: PromptIds,
    responses: ResponseIds,
    response_mask: ResponseIds,
    input_ids: Ids,
    attention_mask: Ids,
    position_ids: Ids,
    rm_scores: OfResponse,
    uid: Uids,
    data_source: Sources,
    reward_model: Objects,
    extra_info: Objects,
    rollout_log_probs: OfResponse | None = None,
    *,
    learner: Learner,
) -> OldLogProbs:
    """The policy's own log-probabilities before its update; the entropies go back for one metric."""


class RefLogProb(NamedTuple):
    """float32 (verl/trainer/ppo/ray_trainer.py: _compute_ref_log_prob)."""

    ref_log_prob: OfResponse


@hop(owner="ref", lifetime="step", described="ref_policy_wg.compute_ref_log_prob, a DataProto through Ray")
def ref_log_prob(
    prompts: PromptIds,
    responses: ResponseIds,
    response_mask: ResponseIds,
    input_ids: Ids,
    attention_mask: Ids,
    position_ids: Ids,
    rm_scores: OfResponse,
    uid: Uids,
    data_source: Sources,
    reward_model: Objects,
    extra_info: Objects,
    rollout_log_probs: OfResponse | None = None,
    old_log_probs: OfResponse | None = None,
) -> RefLogProb:
    """The reference policy's log-probabilities."""


class Values(NamedTuple):
    """float32 (verl/trainer/ppo/ray_trainer.py: _compute_values)."""

    values: OfResponse


@hop(owner="critic", lifetime="step", described="critic_wg.infer_batch, a DataProto through Ray")
def values(
    prompts: PromptIds,
    responses: ResponseIds,
    response_mask: ResponseIds,
    input_ids: Ids,
    attention_mask: Ids,
    position_ids: Ids,
    rm_scores: OfResponse,
    uid: Uids,
    data_source: Sources,
    reward_model: Objects,
    extra_info: Objects,
    rollout_log_probs: OfResponse | None = None,
    old_log_probs: OfResponse | None = None,
    ref_log_prob: OfResponse | None = None,
) -> Values:
    """The critic's values."""


class Advantages(NamedTuple):
    """float32, as wide as the response (verl/trainer/ppo/core_algos.py; ray_trainer.py: fit, compute_advantage)."""

    token_level_scores: OfResponse
    token_level_rewards: OfResponse
    advantages: OfResponse
    returns: OfResponse


@hop(owner="driver", lifetime="step", described="compute_advantage, in the driver's process")
def advantage(
    rm_scores: OfResponse,
    response_mask: ResponseIds,
    uid: Uids,
    old_log_probs: OfResponse | None = None,
    rollout_log_probs: OfResponse | None = None,
    ref_log_prob: OfResponse | None = None,
    values: OfResponse | None = None,
) -> Advantages:
    """Scores become rewards, and those advantages and returns; "executed on the driver process", says `fit`."""


class Updated(NamedTuple):
    """weights: sent to the engines by checkpoint_manager.update_weights, past the driver."""

    weights: Annotated[dict[str, Any], Tensors()]
    metrics: Annotated[dict[str, float], Scalars()]


@effect(
    uses=Learner,
    owner="actor",
    lifetime="version",
    described="actor_rollout_wg.update_actor, a DataProto through Ray",
)
def update_actor(
    prompts: PromptIds,
    responses: ResponseIds,
    response_mask: ResponseIds,
    input_ids: Ids,
    attention_mask: Ids,
    position_ids: Ids,
    rm_scores: OfResponse,
    token_level_scores: OfResponse,
    token_level_rewards: OfResponse,
    advantages: OfResponse,
    returns: OfResponse,
    uid: Uids,
    data_source: Sources,
    reward_model: Objects,
    extra_info: Objects,
    rollout_log_probs: OfResponse | None = None,
    old_log_probs: OfResponse | None = None,
    ref_log_prob: OfResponse | None = None,
    values: OfResponse | None = None,
    *,
    learner: Learner,
) -> Updated:
    """Mini-batches of ppo_mini_batch_size prompts, ppo_epochs times."""


class Metrics(NamedTuple):
    metrics: Annotated[dict[str, float], Scalars()]


@hop(owner="critic", lifetime="step", described="critic_wg.train_mini_batch, a DataProto through Ray")
def update_critic(
    prompts: PromptIds,
    responses: ResponseIds,
    response_mask: ResponseIds,
    input_ids: Ids,
    attention_mask: Ids,
    position_ids: Ids,
    rm_scores: OfResponse,
    token_level_scores: OfResponse,
    token_level_rewards: OfResponse,
    advantages: OfResponse,
    returns: OfResponse,
    values: OfResponse,
    uid: Uids,
    data_source: Sources,
    reward_model: Objects,
    extra_info: Objects,
    rollout_log_probs: OfResponse | None = None,
    old_log_probs: OfResponse | None = None,
    ref_log_prob: OfResponse | None = None,
) -> Metrics:
    """The critic's own mini-batches; its weights go nowhere."""


@effect(
    uses=Engine,
    owner="rollout",
    lifetime="version",
    described="checkpoint_manager.update_weights, past the driver",
)
def update_weights(
    weights: Annotated[dict[str, Any], Tensors()], batch_id: Int64[Array, ""], *, engine: Engine
) -> Annotated[Version, Latest(initial=0)]:
    """The trained weights become the engines'."""
