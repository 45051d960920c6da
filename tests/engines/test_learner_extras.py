"""What a learner's options do to a step: activations computed again, adapters, frozen models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experts import save_experts
from learner_rows import LOSS, assert_same_gradient, digest, our_gradient, sampled
from safetensors.torch import load_file
from test_learner_replay import MODELS, routed
from transformers import AutoModelForCausalLM, LlamaConfig

from flowgraph.errors import ModelError
from flowgraph.learners.lora import merged
from flowgraph.learners.protocol import Losses, Tokens
from flowgraph.learners.registry import LoraOptions
from flowgraph.learners.torch import TorchLearner

ROWS = sampled(3, 20, 4, 30)


def learner(model: Path, **more: Any) -> TorchLearner:
    return TorchLearner(str(model), **{"lr": 1e-2, "dtype": "float32", "threads": 1} | more)


@pytest.mark.parametrize("how", ["padded", "packed", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_computed_again_give_the_same_bits(tiny: Path, how: str, dtype: str) -> None:
    (_, kept), (_, again) = (
        our_gradient(learner(tiny, pack=how, dtype=dtype, max_tokens=128, checkpoint=checkpoint), ROWS)
        for checkpoint in (False, True)
    )
    assert digest(again) == digest(kept)


def test_layers_keep_what_enters_them_alone(tiny: Path) -> None:
    """Of the tensors that a forward saves for its backward, those of one layer of two are gone."""

    def saved(checkpoint: bool) -> int:
        sizes: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        one = learner(tiny, checkpoint=checkpoint)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            our_gradient(one, ROWS)
        return len(sizes)

    assert saved(True) < saved(False) / 3


@pytest.mark.parametrize("kind", MODELS)
def test_what_was_recorded_is_put_in_again(tmp_path: Path, kind: str) -> None:
    """A random choice, which the routers would not make: computed again with their own, the gradient would differ."""
    model = save_experts(tmp_path / kind, **MODELS[kind])
    rows = routed(model, sampled(2, 5, 2, 6), random=1)
    _, kept = our_gradient(learner(model), rows)
    _, again = our_gradient(learner(model, checkpoint=True), rows)
    assert digest(again) == digest(kept)
    metrics = learner(model, checkpoint=True).step(rows, LOSS)
    assert metrics["routing_mismatch"] == 0


def test_a_frozen_learner_scores_and_takes_no_step(tiny: Path) -> None:
    frozen = learner(tiny, frozen=True, lr=None)
    np.testing.assert_array_equal(frozen.logprobs(ROWS), learner(tiny).logprobs(ROWS))
    with pytest.raises(RuntimeError, match="the learner is frozen: it scores rows and takes no step"):
        frozen.step(ROWS, LOSS)
    assert not any(parameter.requires_grad for parameter in frozen._model.parameters())
    assert frozen._optimizer._slots == []


# --- adapters ----------------------------------------------------------------------------------------------------


def test_merging_adds_the_update_and_takes_the_adapters_away() -> None:
    base, low, high = torch.ones(3, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0], [2.0]])
    tensors = {
        "a.base_layer.weight": base,
        "a.lora_A.default.weight": low,
        "a.lora_B.default.weight": high,
        "a.base_layer.bias": torch.zeros(3),
        "norm.weight": torch.ones(2),
    }
    found = merged(tensors, LoraOptions(rank=1, alpha=0.5))
    assert list(found) == ["a.weight", "a.bias", "norm.weight"]
    assert found["a.weight"].tolist() == [[1.5, 2.0], [1.0, 1.0], [2.0, 3.0]]
    assert base.tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_an_adapted_model_is_the_merged_one(
    save: Callable[..., Path], tmp_path: Path, tied: bool, targets: tuple[str, ...] | None
) -> None:
    pytest.importorskip("peft")
    model = save(LlamaConfig, tie_word_embeddings=tied, attention_bias=True)
    one = learner(model, lora=LoraOptions(rank=4, alpha=8, targets=targets), lr=1e-2)
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = dict(start.named_parameters())
    assert one.weights().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.weights().items())
    np.testing.assert_array_equal(one.logprobs(ROWS), learner(model).logprobs(ROWS))
    for _ in range(2):  # the first moves B alone: A's gradient is B's, which is 0
        one.step(ROWS, LOSS)
    changed = {name for name, tensor in one.weights().items() if not torch.equal(tensor, before[name])}
    wanted = targets or ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert changed == {name for name in before if name.endswith(tuple(f"{t}.weight" for t in wanted))}
    one.save(str(tmp_path / "saved"))
    assert digest(load_file(tmp_path / "saved" / "model.safetensors")) == digest(one.weights())
    again = learner(tmp_path / "saved")
    np.testing.assert_allclose(again.logprobs(ROWS), one.logprobs(ROWS), atol=1e-4)


def test_only_adapters_have_gradients_and_moments(tiny: Path) -> None:
    pytest.importorskip("peft")
    one = learner(tiny, lora=LoraOptions(rank=2, alpha=2), checkpoint=True)
    assert {slot.data.shape.numel() for slot in one._optimizer._slots} <= {2 * n for n in (64, 32, 128)}
    one.step(ROWS, LOSS)
    trained = {name for name, parameter in one._model.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name for name in trained)


def test_adapters_begin_alike(tiny: Path) -> None:
    pytest.importorskip("peft")
    lora = LoraOptions(rank=2, alpha=2)
    one, other = (learner(tiny, lora=lora) for _ in range(2))
    ours, theirs = (our_gradient(each, ROWS)[1] for each in (one, other))
    assert_same_gradient(ours, theirs, 0)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (("c_attn",), "c_attn: the model has no layer of that name"),
        (("q_proj", "k_projj"), "k_projj: the model has no layer of that name"),
        (("q_proj", "lm_head"), "lm_head: lm_head is no linear layer of the backbone"),
        (("embed_tokens",), "embed_tokens: model.embed_tokens is no linear layer of the backbone"),
        (("input_layernorm",), "input_layernorm: .*input_layernorm is no linear layer of the backbone"),
    ],
)
def test_a_target_that_is_no_linear_layer_of_the_backbone_is_refused(
    tiny: Path, targets: tuple[str, ...], says: str
) -> None:
    """peft would pass over the first two, and train what the learner computes elsewhere or ties."""
    pytest.importorskip("peft")
    with pytest.raises(
        ModelError, match=rf"lora\.targets {says}\n  help: name some of q_proj, k_proj, v_proj"
    ):
        learner(tiny, lora=LoraOptions(rank=2, alpha=2, targets=targets))


@pytest.mark.parametrize("name", ["loss", "tokens", "entropy", "lr", "skipped", "routing_mismatch", "x of"])
def test_a_loss_gives_no_metric_by_a_name_of_the_learner(tiny: Path, name: str) -> None:
    def loss(tokens: Tokens) -> Losses:
        return LOSS(tokens)._replace(metrics={name: torch.zeros_like(tokens.entropy)})

    one = learner(tiny)
    before = digest(one.weights())
    with pytest.raises(ValueError, match=f"the loss's metric '{name}' has the name of"):
        one.step(ROWS, loss)
    assert digest(one.weights()) == before


def test_a_metric_whose_spread_is_told_has_its_names_alone(tiny: Path) -> None:
    def loss(tokens: Tokens) -> Losses:
        zero = torch.zeros_like(tokens.entropy)
        return LOSS(tokens)._replace(metrics={"far_max": zero}, spread={"far": zero})

    with pytest.raises(ValueError, match="'far_max' has the name of another sum of the step"):
        learner(tiny).step(ROWS, loss)
