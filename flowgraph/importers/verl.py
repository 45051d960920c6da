"""A verl config as a graph: what its DataProto path ships, by the options of verl 0.9.1.

Defaults are those of verl/trainer/config/_generated_ppo_trainer.yaml. Which workers there are is decided as
verl/trainer/ppo/utils.py does (`need_critic`, `need_reference_policy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgraph.importers.hydra import read_config
from flowgraph.importers.result import FULL, Imported, fitting, full, graph_text, model_of, reason

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.enable_rollout_routing_replay": False,
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.router_replay.mode": "disabled",
    "algorithm.rollout_correction.bypass_mode": False,
    "critic.enable": None,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.use_v1": True,
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{ACTOR}.megatron.tensor_model_parallel_size": 1,
    f"{ACTOR}.megatron.pipeline_model_parallel_size": 1,
    f"{ACTOR}.megatron.context_parallel_size": 1,
}
# Why an option changes nothing that crosses between the controller and the workers → which do so, with * for any text.
RULES = {
    "logging": """trainer.logger trainer.project_name trainer.experiment_name trainer.log_val_generations
        trainer.rollout_data_dir trainer.validation_data_dir""",
    "checkpoints": """trainer.save_freq trainer.default_*dir trainer.resume_* trainer.del_local_ckpt*
        trainer.max_*_ckpt_to_keep trainer.esi_redundant_time *.checkpoint.*""",
    "validation": "trainer.test_freq trainer.val_* data.val_* data.validation_shuffle *.val_kwargs.*",
    "how long and in which order it runs": """trainer.total_epochs trainer.total_training_steps
        trainer.critic_warmup trainer.balance_batch trainer.device trainer.ray_wait*""",
    "profiling": "*.profiler.* global_profiler.* *.trace.* *.prometheus.*",
    "how a worker holds its model": """*.optim.* *.fsdp_config.* *.fsdp.* *.qat.* *.torchtitan.* *.veomni.*
        *.strategy *.megatron.*""",
    "how a worker splits what it got": """*micro_batch_size *micro_batch_size_per_gpu *max_token_len_per_gpu
        *.use_dynamic_bsz *mini_batch_size *.ppo_epochs""",
    "the loss": """ACTOR.clip_ratio* ACTOR.entropy_* ACTOR.kl_loss_* ACTOR.loss_* ACTOR.policy_loss.*
        ACTOR.grad_clip ACTOR.shuffle ACTOR.calculate_* ACTOR.tau_* ACTOR.data_loader_seed
        ACTOR.use_torch_compile ACTOR.freeze_* critic.cliprange* critic.loss_*""",
    "how advantages are computed": """algorithm.gamma algorithm.lam algorithm.kl_ctrl.* algorithm.kl_penalty
        algorithm.norm_adv_by_std_in_grpo algorithm.pf_ppo.* algorithm.use_pf_ppo
        algorithm.rollout_correction.*""",
    "how a model is loaded": "actor_rollout_ref.model.[!l]* critic.model.[!l]*",
    "inside the engines": """ROLLOUT.gpu_memory_utilization ROLLOUT.*_parallel_size ROLLOUT.enforce_eager
        ROLLOUT.free_cache_engine ROLLOUT.load_format ROLLOUT.max_num_* ROLLOUT.max_model_len ROLLOUT.dtype
        ROLLOUT.enable_chunked_prefill ROLLOUT.enable_prefix_caching ROLLOUT.disable_* ROLLOUT.engine_kwargs*
        ROLLOUT.cudagraph_* ROLLOUT.name ROLLOUT.mode ROLLOUT.ignore_eos ROLLOUT.layered_summon
        ROLLOUT.scheduling_policy ROLLOUT.checkpoint_engine.* ROLLOUT.agent.* ROLLOUT.seed
        ROLLOUT.full_determinism ROLLOUT.skip_tokenizer_init ROLLOUT.nnodes ROLLOUT.n_gpus_per_node
        ROLLOUT.logprobs_mode ROLLOUT.multi_stage_wake_up""",
    "sampling": "ROLLOUT.temperature ROLLOUT.top_p ROLLOUT.top_k ROLLOUT.do_sample ROLLOUT.*_length",
    "which rows are read, and how": """data.train_files data.train_max_samples data.prompt_key
        data.reward_fn_key data.shuffle data.seed data.truncation data.filter_* data.trust_remote_code
        data.dataloader_num_workers data.tokenizer data.use_shm data.cache_dir data.custom_cls.*
        data.sampler.* data.datagen.* data.apply_chat_template_kwargs data.tool_config_path""",
    "the reward, which is computed where responses are sampled": "reward.* reward_model.* custom_reward_function.*",
    "how workers are placed and set up": """actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout
        actor_rollout_ref.ref.* critic.* ray_kwargs.* transfer_queue.* *._target_""",
}
BATCH = (
    "prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rm_scores",
    "data_source", "reward_model", "extra_info",
)  # fmt: skip
PATTERNS = {
    why: names.replace("ACTOR", ACTOR).replace("ROLLOUT", ROLLOUT).split() for why, names in RULES.items()
}
NOT_DESCRIBED = {
    f"{ROLLOUT}.enable_rollout_routing_replay": "routed experts are not in the graph",
    f"{ACTOR}.router_replay.mode": "routed experts are not in the graph",
}


def import_verl(path: Path, overrides: Sequence[str] = ()) -> Imported:
    """What a run of this config ships. Raises ValueError for what is no config or a value that can't be; OSError."""
    given, unread = read_config(path, overrides)
    assumed = [f"{word} has no value in the file" for word in unread]
    options = _Options(given)
    graph = _graph(options, path, assumed)
    ignored, unknown = {}, []
    for name in given:
        if name not in options.used:
            why = reason(PATTERNS, name)
            if why:
                ignored[name] = why
            else:
                unknown.append(name)
    comments = [
        f"What a verl run of {path.name} ships, as its DataProto path does (trainer.use_v1=False).",
        "Price it with `flowgraph audit --naive`; its hops are described, and do not run.",
    ]
    return Imported(graph_text(graph, comments), options.used, ignored, unknown, assumed)


class _Options:
    """The options with their defaults; `used` says what each that was given has decided."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.used = given, dict[str, str]()

    def get(self, name: str, what: str) -> Any:
        if name in self.given:
            self.used[name] = what.format(self.given[name])
        value = self.given.get(name)
        return DEFAULTS[name] if value is None else value

    def count(self, name: str, what: str) -> int:
        value = self.get(name, what)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{name} is {value!r}; give a whole number of at least 1, as an override behind the file"
            )
        return int(value)

    def flag(self, name: str, what: str) -> bool:
        value = self.get(name, what)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; give True or False, as an override behind the file")
        return value


def _graph(options: _Options, path: Path, assumed: list[str]) -> dict[str, Any]:
    dims: dict[str, Any] = {
        "group": options.count("data.train_batch_size", "dims.group {}"),
        "sample": options.count(f"{ROLLOUT}.n", "dims.sample {}"),
        "prompt": full(options.count("data.max_prompt_length", "dims.prompt {}")),
        "response": full(options.count("data.max_response_length", "dims.response {}")),
    }
    assumed.append(FULL)
    for name, what in NOT_DESCRIBED.items():
        if options.get(name, what) not in (False, "disabled"):
            assumed.append(
                f"{name}={options.given[name]}: {what}; see graphs/r3_deepseek_v3.yaml for what they cost"
            )
    if options.flag("trainer.use_v1", "the DataProto path is described all the same"):
        assumed.append(
            "trainer.use_v1 is on, as by default: it ships rows unpadded, so read `audit` without --naive"
        )
    model = model_of(
        str(options.get("actor_rollout_ref.model.path", "the model of engine and learner")), assumed
    )
    hops, trained = _hops(options)
    ranks = {"ranks": found} if (found := _ranks(options, dims["group"] * dims["sample"])) else {}
    owners: dict[str, Any] = {
        "driver": {},
        "rollout": {"engine": {"use": "transformers", "model": model}},
        "actor": {**ranks, "learner": {"use": "torch", "model": model, "lr": 1e-6}},
    }
    owners |= {name: dict(ranks) for name in trained}
    return {
        "graph": "".join(c if c.isalnum() else "_" for c in path.stem).strip("_") or "verl",
        "doc": f"What verl ships with {path.name}",
        "dims": dims,
        "owners": owners,
        "hops": hops,
    }


def _hops(options: _Options) -> tuple[dict[str, Any], list[str]]:
    """(hops, owners besides the actor that read the batch), in the order in which `fit` calls them."""
    logged = options.flag(f"{ROLLOUT}.calculate_log_probs", "rollout_log_probs cross: {}")
    bypass = options.flag("algorithm.rollout_correction.bypass_mode", "no hop old_log_prob: {}")
    estimator = options.get("algorithm.adv_estimator", "the advantage, and a critic if it is gae")
    wanted = options.get("critic.enable", "a critic: {}")
    critic = estimator == "gae" if wanted is None else bool(wanted)
    kl = [
        options.flag("algorithm.use_kl_in_reward", "a reference: {}"),
        options.flag(f"{ACTOR}.use_kl_loss", "a reference: {}"),
    ]
    columns = dict.fromkeys(BATCH, "batch") | {"uid": "dataset.uid"}
    columns |= {"rollout_log_probs": "batch"} if logged else {}
    hops: dict[str, Any] = {
        "dataset": {"use": "hops.peers.verl.dataset"},
        "dispatch": {
            "use": "hops.dispatch.watermark",
            "in": {
                "group": "dataset", "finished": "rollout", "free": "buffer", "dropped": "batch",
                "version": {"from": "sync", "delay": 1, "max_lag": 0},
            },
        },
        "rollout": {
            "use": f"hops.peers.verl.rollout{'_log_probs' if logged else ''}",
            "in": {
                "raw_prompt": "dispatch", "uid": "dataset.uid", "data_source": "dispatch", "reward_model": "dispatch",
                "extra_info": "dispatch",
            },
        },
        "buffer": {"use": "hops.buffer.ready", "in": {"trajectory": "rollout", "taken": "batch", "dropped": "batch"}},
        "batch": {"use": "hops.batch.oldest_first", "in": {"ready": "buffer"}},
    }  # fmt: skip
    if not bypass:
        hops["old_log_prob"] = {"use": "hops.peers.verl.old_log_prob", "in": dict(columns)}
        columns["old_log_probs"] = "old_log_prob"
    if any(kl):
        hops["ref_log_prob"] = {"use": "hops.peers.verl.ref_log_prob", "in": dict(columns)}
        columns["ref_log_prob"] = "ref_log_prob"
    if critic:
        hops["values"] = {"use": "hops.peers.verl.values", "in": dict(columns)}
        columns["values"] = "values"
    known = (
        "rm_scores",
        "response_mask",
        "uid",
        "old_log_probs",
        "rollout_log_probs",
        "ref_log_prob",
        "values",
    )
    hops["advantage"] = {
        "use": "hops.peers.verl.advantage",
        "in": {name: columns[name] for name in known if name in columns},
    }
    made = ("token_level_scores", "token_level_rewards", "advantages", "returns")
    columns |= dict.fromkeys(made, "advantage")
    if critic:
        hops["update_critic"] = {"use": "hops.peers.verl.update_critic", "in": dict(columns)}
    hops["update_actor"] = {"use": "hops.peers.verl.update_actor", "in": dict(columns)}
    hops["sync"] = {
        "use": "hops.peers.verl.update_weights",
        "in": {"weights": "update_actor", "batch_id": "batch"},
    }
    return hops, [name for name, there in (("ref", any(kl)), ("critic", critic)) if there]


def _ranks(options: _Options, rows: int) -> dict[str, int]:
    """How the actor's processes split a batch: data parallel by trajectory, sequence and context parallel by token.

    Tensor and pipeline parallel ranks split no column: each reads what its data-parallel rank does.
    """
    nodes = options.count("trainer.nnodes", "{} nodes of ranks")
    world = nodes * options.count("trainer.n_gpus_per_node", "{} ranks a node")
    sequence = options.count(f"{ACTOR}.ulysses_sequence_parallel_size", "ranks that share a sequence: {}")
    context = options.count(f"{ACTOR}.megatron.context_parallel_size", "ranks that share a sequence: {}")
    tensor = options.count(
        f"{ACTOR}.megatron.tensor_model_parallel_size", "ranks that read the same rows: {}"
    )
    stages = options.count(
        f"{ACTOR}.megatron.pipeline_model_parallel_size", "ranks that read the same rows: {}"
    )
    split = max(1, world // (sequence * context * tensor * stages))
    return fitting({"trajectory": split, "token": sequence * context}, rows)
