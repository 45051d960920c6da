"""A slime run as a graph: what its rollout manager gets from the engines and hands to the trainers, at commit 624b824a.

What is shipped is what slime/ray/rollout.py (`_convert_samples_to_train_data`, `_split_train_data_by_dp`) packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgraph.importers.result import FULL, Imported, fitting, full, graph_text, model_of, reason
from flowgraph.importers.shell import read_script

RULES = {
    "logging": "--use-wandb --wandb-* --use-tensorboard --tb-* --log-*",
    "checkpoints": "--load --save --save-* --ref-load --ref-ckpt-step --async-save --no-save-optim",
    "validation": "--eval-* --n-samples-per-eval-prompt --skip-eval-before-train",
    "how long and in which order it runs": """--num-rollout --num-epoch --start-rollout-id --global-batch-size
        --num-steps-per-rollout --balance-* --rollout-shuffle --rollout-seed --seed""",
    "which rows are read, and how": """--prompt-data --input-key --label-key --metadata-key --tool-key
        --apply-chat-template --apply-chat-template-kwargs --data-source-path""",
    "sampling": """--rollout-temperature --rollout-top-k --rollout-stop --rollout-stop-token-ids
        --rollout-skip-special-tokens""",
    "the reward, which is computed in the rollout manager": """--rm-type --rm-url --reward-key --eval-reward-key
        --group-rm --custom-rm-path""",
    "the loss": """--kl-* --use-kl-loss --use-unbiased-kl --entropy-coef --eps-clip* --value-clip --use-tis
        --tis-clip* --gamma --lambd --normalize-advantages --calculate-per-token-loss --disable-grpo-std-normalization
        --use-rollout-logprobs""",
    "how a worker holds its model": """--recompute-* --optimizer* --lr* --weight-decay --adam-* --clip-grad
        --overlap-* --use-precision-aware-optimizer --sequence-parallel --expert-*-parallel-size --offload*
        --attention-* --hidden-dropout --accumulate-allreduce-grads-in-fp32 --*-in-fp32 --train-backend
        --megatron-* --model-name --moe-* --distributed-*""",
    "how a worker splits what it got": "--use-dynamic-batch-size --max-tokens-per-gpu --micro-batch-size --log-probs-*",
    "inside the engines": "--sglang-* --rollout-num-gpus --rollout-num-gpus-per-engine --rollout-external-engine-addrs",
    "what a model is made of, which its config says too": """--disable-bias-linear --*-layernorm --group-query-attention
        --num-attention-heads --num-query-groups --kv-channels --ffn-hidden-size --normalization --position-embedding-*
        --norm-epsilon --rotary-* --swiglu --untie-embeddings-and-output-weights --hidden-size --q-lora-rank
        --kv-lora-rank --qk-* --v-head-dim --multi-latent-attention --make-vocab-size-divisible-by --use-rotary-*""",
    "how workers are placed and set up": """--num-gpus-per-node --colocate --use-fault-tolerance
        --rollout-health-check-*""",
}
PATTERNS = {why: names.split() for why, names in RULES.items()}
TRAINED = (
    "tokens",
    "loss_masks",
    "response_lengths",
    "rewards",
    "raw_reward",
    "truncated",
    "rollout_mask_sums",
)


def import_slime(arguments: Sequence[str]) -> Imported:
    """What a run with these arguments ships: the options themselves, or the path of a script that gives them.

    Raises ValueError for a value that can't be, for what is no option, and for a script without a run; and OSError.
    """
    name, words, unread, marker = "slime", list(arguments), [], "train.py"
    if len(words) == 1 and words[0].endswith(".sh"):
        path = Path(words[0])
        script = read_script(path, ("train.py", "train_async.py"))
        name, words, unread, marker = path.stem, script.words, script.unread, script.marker
    given = _options(words)
    assumed = [f"{word} has no value in the script" for word in unread]
    used: dict[str, str] = {}
    graph = _graph(name, given, used, assumed, late=marker.endswith("train_async.py"))
    ignored: dict[str, str] = {}
    unknown: list[str] = []
    for option in given:
        if option not in used:
            why = reason(PATTERNS, option)
            if why:
                ignored[option] = why
            else:
                unknown.append(option)
    comments = [
        "What a slime run ships: Samples from the engines to the rollout manager, and from it to every trainer.",
        "Price it with `flowgraph audit --naive`; its hops are described, and do not run.",
    ]
    return Imported(graph_text(graph, comments), used, ignored, unknown, assumed)


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """--name → its values; --name=value is one, as argparse has it."""
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            given[name] = [value] if equals else []
        elif name:
            given[name].append(word)
        else:
            raise ValueError(
                f"{word!r} belongs to no option; give options such as --rollout-batch-size 32, or one script"
            )
    return given


def _count(given: dict[str, list[str]], used: dict[str, str], option: str, what: str, default: int) -> int:
    if option not in given:
        return default
    values = given[option]
    if len(values) != 1 or not values[0].isdigit() or int(values[0]) < 1:
        raise ValueError(
            f"{option} is {' '.join(values) or 'without a value'}; give a whole number of at least 1"
        )
    used[option] = what.format(values[0])
    return int(values[0])


def _graph(
    name: str, given: dict[str, list[str]], used: dict[str, str], assumed: list[str], *, late: bool
) -> dict[str, Any]:
    def count(option: str, what: str, default: int) -> int:
        return _count(given, used, option, what, default)

    if "--rollout-batch-size" not in given:
        raise ValueError(
            "--rollout-batch-size is missing, which says how many prompts a step has; slime has no default"
        )
    dims: dict[str, Any] = {
        "group": count("--rollout-batch-size", "dims.group {}", 1),
        "sample": count("--n-samples-per-prompt", "dims.sample {}", 1),
        "prompt": full(count("--rollout-max-prompt-len", "dims.prompt {}", 1024)),
        "response": full(count("--rollout-max-response-len", "dims.response {}", 1024)),
    }
    assumed.append(FULL)
    if "--rollout-max-prompt-len" not in given:
        assumed.append(
            "prompts have at most 1,024 tokens: --rollout-max-prompt-len is not given, and slime bounds none"
        )
    routed = "--use-rollout-routing-replay" in given
    if routed:
        used["--use-rollout-routing-replay"] = "rollout_routed_experts cross"
        dims["layers"] = count("--num-layers", "dims.layers {}", 0) or _missing("--num-layers")
        dims["top_k"] = count("--moe-router-topk", "dims.top_k {}", 0) or _missing("--moe-router-topk")
        dims["experts"] = count("--num-experts", "dims.experts {}", 0) or _missing("--num-experts")
    for option, dim in (("--num-layers", "layers"), ("--num-experts", "experts"), ("--vocab-size", "vocab")):
        if option in given and option not in used:
            used[option] = f"the model's {dim}, which no column depends on"
    checkpoint = given.get("--hf-checkpoint", [])
    if checkpoint:
        used["--hf-checkpoint"] = "the model of engine and learner"
    model = model_of(checkpoint[0] if checkpoint else "model", assumed)
    if "--advantage-estimator" in given:
        used["--advantage-estimator"] = "computed in the trainers, so nothing crosses for it"
    if given.get("--rollout-top-p", ["1"]) not in (["1"], ["1.0"]):
        assumed.append(
            "--rollout-top-p below 1 also ships the kept token ids of each step, which are not in the graph"
        )
        used["--rollout-top-p"] = "not described"
    elif "--rollout-top-p" in given:
        used["--rollout-top-p"] = "no kept token ids cross"
    ranks = _ranks(count, dims["group"] * dims["sample"])
    return {
        "graph": "".join(c if c.isalnum() else "_" for c in name).strip("_") or "slime",
        "doc": f"What slime ships with {name}",
        "dims": dims,
        "owners": {
            "driver": {},
            "rollout": {"engine": {"use": "transformers", "model": model}},
            "actor": {
                **({"ranks": ranks} if ranks else {}),
                "learner": {"use": "torch", "model": model, "lr": 1e-6},
            },
        },
        "hops": _hops(routed, max_lag=int(late)),
    }


def _missing(option: str) -> int:
    raise ValueError(
        f"--use-rollout-routing-replay needs {option}, to say how much it ships; add it to the arguments"
    )


def _ranks(count: Any, rows: int) -> dict[str, int]:
    """Data parallel ranks split rows, context parallel ones tokens; tensor and pipeline parallel ones read the same."""
    nodes, each = (
        count("--actor-num-nodes", "{} nodes of ranks", 1),
        count("--actor-num-gpus-per-node", "{} ranks a node", 8),
    )
    context = count("--context-parallel-size", "ranks that share a sequence: {}", 1)
    tensor = count("--tensor-model-parallel-size", "ranks that read the same rows: {}", 1)
    stages = count("--pipeline-model-parallel-size", "ranks that read the same rows: {}", 1)
    split = max(1, nodes * each // (context * tensor * stages))
    return fitting({"trajectory": split, "token": context}, rows)


def _hops(routed: bool, *, max_lag: int) -> dict[str, Any]:
    kind = "_routed" if routed else ""
    columns = dict.fromkeys(TRAINED, "batch") | {"rewards": "rewards", "rollout_log_probs": "batch"}
    columns |= {"rollout_routed_experts": "batch"} if routed else {}
    return {
        "dataset": {"use": "hops.peers.slime.dataset"},
        "dispatch": {
            "use": "hops.dispatch.watermark",
            "in": {
                "group": "dataset", "finished": "rollout", "free": "buffer", "dropped": "batch",
                "version": {"from": "sync", "delay": 1, "max_lag": max_lag},
            },
        },
        "rollout": {"use": f"hops.peers.slime.rollout{kind}", "in": {"prompt": "dispatch", "label": "dispatch"}},
        "buffer": {"use": "hops.buffer.ready", "in": {"trajectory": "rollout", "taken": "batch", "dropped": "batch"}},
        "batch": {"use": "hops.batch.oldest_first", "in": {"ready": "buffer"}},
        "rewards": {"use": "hops.peers.slime.rewards", "in": {"raw_reward": "batch"}},
        "train": {"use": f"hops.peers.slime.train{kind}", "in": columns},
        "sync": {"use": "hops.peers.slime.update_weights", "in": {"weights": "train", "batch_id": "batch"}},
    }  # fmt: skip
