"""What experts a model executes, read and put in: tiny random models, one with more experts than a byte can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experts import config
from tiny_llama import SIZES
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from flowgraph.errors import ModelError
from flowgraph.models.choices import WEIGHTS, Choices

IDS = torch.arange(10).view(2, 5) * 7 % 97
SMALL: dict[str, Any] = SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MANY = {"num_experts": 300, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
KINDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen, 32 experts": lambda: config("qwen", num_experts=32, mlp_only_layers=[1]),
    "qwen, 300 experts": lambda: config("qwen", **MANY),
    "qwen, not normalised": lambda: config("qwen", norm_topk_prob=False),
    "glm, 300 experts": lambda: config("glm"),
    "olmoe": lambda: OlmoeConfig(**SMALL, num_experts=8),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=8),
    "deepseek": lambda: DeepseekV3Config(**DEEPSEEK),
}  # fmt: skip
DEEPSEEK = SMALL | {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_hidden_layers": 3}
DEEPSEEK |= {"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8}
DEEPSEEK |= {"qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}


def model_of(made: PreTrainedConfig, dtype: torch.dtype = torch.float32, how: str | None = None) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made, dtype=dtype, experts_implementation=how).eval()


def run(model: Any, choices: Choices, ids: Tensor = IDS) -> tuple[Tensor, Tensor]:
    """The logits, and i64[T, layer, k] as executed."""
    with choices.capture() as captured:
        logits = model(ids).logits
    return logits, captured.indices


def changed(choices: Choices, indices: Tensor) -> Tensor:
    """Other experts for every token and layer."""
    return (indices + 1) % choices.experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_does_what_it_did_with_its_own_choice_and_executes_any_other(
    kind: str, dtype: torch.dtype
) -> None:
    model = model_of(KINDS[kind](), dtype)
    choices = Choices(model)
    with torch.no_grad():
        logits, own = run(model, choices)
        assert own.dtype == torch.int64
        assert own.shape == (10, choices.layers, choices.top_k)
        moe = list(choices.moe_layers)
        assert own[:, moe].max() < choices.experts
        assert not own[:, [at for at in range(choices.layers) if at not in moe]].any()
        every = torch.ones(10, dtype=torch.bool)
        with choices.force(own, every):
            again, executed = run(model, choices)
        assert torch.equal(again, logits)
        assert torch.equal(executed, own)
        with choices.force(changed(choices, own), every):
            other, executed = run(model, choices)
        assert torch.equal(executed[:, moe], changed(choices, own)[:, moe])
        assert not torch.equal(other, logits)
        assert torch.equal(model(IDS).logits, logits)  # nothing is left behind


def test_rows_that_are_not_given_choose_for_themselves() -> None:
    """X2. What stands in a row that was not recorded is not read, and is no expert 0."""
    model = model_of(config("qwen", num_experts=32), how="batched_mm")
    choices = Choices(model)
    given = torch.tensor([False, True, False, False, True] * 2)
    with torch.no_grad():
        _, own = run(model, choices)
        wanted = changed(choices, own)
        wanted[~given] = -7
        with choices.force(wanted.to(torch.int32), given):
            _, executed = run(model, choices)
    assert torch.equal(executed[given], wanted[given])
    # The first token of a line has only itself before it, so its own choice is what it was.
    assert torch.equal(executed[[0, 5]], own[[0, 5]])
    assert ((executed[~given] >= 0) & (executed[~given] < 32)).all()


def test_the_gradient_reaches_the_router_through_the_weights_of_what_was_put_in() -> None:
    model = model_of(config("qwen", num_experts=32))
    choices = Choices(model)
    every = torch.ones(10, dtype=torch.bool)

    def gradients(forced: Tensor | None) -> list[Tensor]:
        model.zero_grad()
        if forced is None:
            model(IDS).logits.square().mean().backward()
        else:
            with choices.force(forced, every):
                model(IDS).logits.square().mean().backward()
        return [layer.mlp.gate.weight.grad.clone() for layer in model.model.layers]

    _, own = run(model, choices)
    plain, same, other = gradients(None), gradients(own), gradients(changed(choices, own))
    for at in range(choices.layers):
        assert torch.equal(plain[at], same[at])
        rows = other[at].abs().sum(dim=1) > 0  # without normalisation over all: only chosen experts have one
        assert rows[changed(choices, own)[:, at].unique()].all()
        assert not torch.equal(plain[at], other[at])


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    model = model_of(config("qwen"))
    choices = Choices(model)
    logits, own = run(model, choices)
    every = torch.ones(10, dtype=torch.bool)
    late = pytest.raises(ValueError, match="choices of 10 tokens were given, and the forward has 5")
    with late, choices.force(changed(choices, own), every):
        model(IDS[:1])
    assert torch.equal(model(IDS).logits, logits)
    with choices.force(own, every):
        with pytest.raises(RuntimeError, match="leave that `force` first"), choices.force(own, every):
            pass
        assert torch.equal(model(IDS).logits, logits)
    with choices.capture() as captured, pytest.raises(ValueError, match="input_ids"):
        model(None)
    with pytest.raises(RuntimeError, match="no forward of the model was completed"):
        _ = captured.indices


def _put(at: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    def change(indices: Tensor) -> Tensor:
        indices = indices.clone()
        indices[at] = value
        return indices

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i: i[:9], r"torch.int64 \[9, 3, 2\], expected integers \[10, 3, 2\]"),
        (lambda i: i[:, :2], r"\[10, 2, 2\], expected integers \[10, 3, 2\]"),
        (lambda i: i.double(), r"torch.float64 \[10, 3, 2\], expected integers"),
        (_put((3, 1, 0), 8), r"of layer 1, token 3: experts \[8, \d\], expected 0 to 7"),
        (_put((0, 2, 1), -1), r"of layer 2, token 0: experts \[\d, -1\], expected 0 to 7"),
        (lambda i: torch.zeros_like(i), r"of layer 0, token 0: experts \[0, 0\], expected distinct experts"),
    ],
)
def test_what_is_no_choice_is_refused_by_name(change: Callable[[Tensor], Tensor], says: str) -> None:
    """X1, X2. Among them an index that is no expert, and zeros where nothing was recorded."""
    model = model_of(config("qwen"))
    choices = Choices(model)
    _, own = run(model, choices)
    with pytest.raises(ValueError, match=says), choices.force(change(own), torch.ones(10, dtype=torch.bool)):
        pass
    bad = pytest.raises(ValueError, match=r"given is torch.int64 \[10\], expected bool")
    with bad, choices.force(own, torch.ones(10, dtype=torch.int64)):
        pass


def test_a_model_that_is_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM has no layer with experts"):
        Choices(model_of(LlamaConfig(**SIZES)))
    qwen2 = Qwen2MoeConfig(
        **SMALL, num_experts=8, shared_expert_intermediate_size=16, use_sliding_window=False
    )
    with pytest.raises(ModelError, match="Qwen2MoeTopKRouter is not known"):
        Choices(model_of(qwen2))
    # A version of transformers whose routers weigh in another way.
    monkeypatch.setitem(WEIGHTS, "Qwen3MoeTopKRouter", WEIGHTS["Glm4MoeTopkRouter"])
    model = model_of(config("qwen"))
    for layer in model.model.layers:
        layer.mlp.gate.routed_scaling_factor = 1.0
    with pytest.raises(ModelError, match="layer 0 gives something else with its own choice"):
        Choices(model)
