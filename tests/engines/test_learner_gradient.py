"""The torch learner computes what a plain Hugging Face forward and backward pass does, row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learner_rows import (
    LOSS,
    PACKINGS,
    assert_same_gradient,
    frozen_learners,
    make_rows,
    our_gradient,
    plain_gradient,
    sampled,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from flowgraph.learners import head as head_module
from flowgraph.learners.head import Given, Head, Targets
from flowgraph.learners.optim import MasterAdamW
from flowgraph.learners.protocol import Losses, Rows
from flowgraph.learners.rows import take
from flowgraph.learners.torch import TorchLearner
from hops.loss import policy_gradient


@pytest.fixture(scope="module")
def learners(tiny: Path) -> dict[str, TorchLearner]:
    return frozen_learners(tiny)


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Rows over few tokens, sharing prefixes in all ways, masks with holes; at least one masked token."""
    row = st.lists(st.integers(0, 3), min_size=2, max_size=9)
    tokens = draw(st.lists(row, min_size=1, max_size=6))
    masks = [
        [0, *draw(st.lists(st.integers(0, 1), min_size=len(r) - 1, max_size=len(r) - 1))] for r in tokens
    ]
    masks[0][-1] = 1
    return make_rows(tokens, masks, draw(st.integers(0, 99)))


slow_ok = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@slow_ok
@given(
    rows=batches(),
    old=st.sampled_from(["train", "rollout"]),
    max_tokens=st.integers(1, 40),
    random=st.randoms(use_true_random=False),
)
def test_any_packing_split_and_order_gives_the_plain_loss_and_gradient(
    learners: dict[str, TorchLearner], tiny: Path, rows: Rows, old: Any, max_tokens: int, random: Random
) -> None:
    loss = policy_gradient(old=old)
    value, gradient, logprobs = plain_gradient(tiny, rows, loss)
    order = random.sample(range(len(rows.offsets) - 1), len(rows.offsets) - 1)
    for learner in learners.values():
        learner._max_tokens = max_tokens
        ours, our_grad = our_gradient(learner, take(rows, order), loss)
        assert ours == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert_same_gradient(our_grad, gradient, 1e-4)
        found = learner.logprobs(rows)
        assert (found[~rows.mask] == 0).all()
        np.testing.assert_allclose(found[rows.mask], logprobs.numpy(), atol=1e-5)


@pytest.mark.parametrize("limits", ["cached", "recomputed", "small blocks"])
def test_packings_agree_to_1e_5_on_real_shapes(
    learners: dict[str, TorchLearner], tiny: Path, monkeypatch: pytest.MonkeyPatch, limits: str
) -> None:
    if limits == "recomputed":
        monkeypatch.setattr("flowgraph.learners.attention._KEPT", 0)
    if limits == "small blocks":
        monkeypatch.setattr(head_module, "_BLOCK", 7)
        monkeypatch.setattr(head_module, "_CACHED", 3 * 260)
        monkeypatch.setattr("flowgraph.learners.pack._QUERIES", 5)
    rows = sampled(3, 20, 4, 30)
    value, gradient, _ = plain_gradient(tiny, rows)
    for learner in learners.values():
        learner._max_tokens = 4096
        ours, our_grad = our_gradient(learner, rows)
        assert ours == pytest.approx(value, rel=1e-5)
        assert_same_gradient(our_grad, gradient, 1e-5)


def test_a_model_with_two_matrices_and_biases_has_the_plain_gradient(save: Callable[..., Path]) -> None:
    model = save(LlamaConfig, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    rows = sampled(2, 6, 3, 5)
    value, gradient, _ = plain_gradient(model, rows)
    for how in PACKINGS:
        learner = TorchLearner(str(model), lr=1e-3, dtype="float32", pack=how, threads=1, max_tokens=24)
        ours, our_grad = our_gradient(learner, rows)
        assert ours == pytest.approx(value, rel=1e-5)
        assert_same_gradient(our_grad, gradient, 1e-5)


def test_B8_the_log_probability_at_i_belongs_to_token_i(save: Callable[..., Path]) -> None:
    """A model that predicts "one more than the last token" with certainty: its logits are one-hot."""
    where = save(LlamaConfig, tie_word_embeddings=False, hidden_size=64, vocab_size=64)
    model = AutoModelForCausalLM.from_pretrained(where)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.lm_head.weight.copy_(10 * torch.eye(64).roll(1, 0))
    model.save_pretrained(where)
    rows = make_rows([[5, 6, 7, 8], [5, 6, 9, 10], [3, 4]], [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1]])
    for how in PACKINGS:
        logprobs = TorchLearner(str(where), lr=0.1, dtype="float32", pack=how, threads=1).logprobs(rows)
        certain = np.array([0, 1, 1, 1, 0, 1, 0, 1, 0, 1], bool)
        assert (logprobs[certain] > -1e-3).all()
        assert logprobs[6] < -50  # 9 after 6


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_L1_lengths_1_and_3_give_loss_half_and_gradient_a_quarter_for_every_split(
    split: list[list[int]],
) -> None:
    """A toy of two tokens and logits [θ, 0] at θ = 0, where dlogp/dθ = 1/2."""
    layer = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(layer.weight)
    head, lengths, advantages = Head(layer, 1.0), [1, 3], [1.0, -1.0]
    loss = 0.0
    for part in split:
        n = sum(lengths[row] for row in part)
        values = torch.cat([torch.full((lengths[row],), advantages[row]) for row in part])
        targets = Targets(torch.arange(n), torch.zeros(n, dtype=torch.int64))
        given = Given({"advantages": values}, torch.zeros(n, dtype=torch.int64), 1)
        loss += head.backward(torch.ones(n, 1), targets, given, LOSS, "token-mean").sums["loss"]
    assert loss / 4 == 0.5
    assert layer.weight.grad is not None
    assert layer.weight.grad[0].item() / 4 == 0.25


@pytest.mark.parametrize("how", PACKINGS)
def test_L4_rows_of_no_mask_change_nothing(learners: dict[str, TorchLearner], how: str) -> None:
    rows = make_rows([[1, 2, 3], [4, 5, 6], [7, 8]], [[0, 1, 1], [0, 0, 0], [0, 0]])
    learner = learners[how]
    learner._max_tokens = 3
    value, gradient = our_gradient(learner, rows)
    alone, alone_gradient = our_gradient(learner, take(rows, [0]))
    assert value == alone
    assert_same_gradient(gradient, alone_gradient, 0)


def test_B9_padding_does_not_touch_a_rows_log_probabilities(learners: dict[str, TorchLearner]) -> None:
    short, long = [1, 2, 3], list(range(4, 40))
    rows = make_rows([short, long], [[0, 1, 1], [0] * 35 + [1]])
    alone = make_rows([short], [[0, 1, 1]])
    for learner in learners.values():
        learner._max_tokens = 4096
        np.testing.assert_allclose(learner.logprobs(rows)[:3], learner.logprobs(alone), atol=1e-6)


def test_B10_no_attention_across_rows(learners: dict[str, TorchLearner]) -> None:
    for learner in learners.values():
        learner._max_tokens = 4096
        one = make_rows([[1, 2, 3, 4], [1, 2, 9, 9]], [[0, 1, 1, 1]] * 2)
        other = make_rows([[1, 2, 3, 4], [1, 2, 7, 8]], [[0, 1, 1, 1]] * 2)
        assert learner.logprobs(one)[:4].tolist() == learner.logprobs(other)[:4].tolist()


def test_temperature_divides_the_logits(tiny: Path) -> None:
    rows = sampled(2, 5, 2, 6)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = torch.from_numpy(rows.tokens[: rows.offsets[1]].astype(np.int64))
    expected = torch.log_softmax(model(ids[None]).logits[0, :-1] / 0.7, -1).gather(1, ids[1:, None])[:, 0]
    learner = TorchLearner(str(tiny), lr=0.1, dtype="float32", temperature=0.7, threads=1)
    found, mask = learner.logprobs(rows)[1 : len(ids)], rows.mask[1 : len(ids)]
    np.testing.assert_allclose(found[mask], expected.detach().numpy()[mask], atol=1e-5)
    loss = learner.step(rows, lambda tokens: Losses(-tokens.logprobs, {"h": tokens.entropy.detach()}))
    assert loss["loss"] == pytest.approx(-learner_mean(tiny, rows, 0.7), rel=1e-4)
    assert loss["h"] == pytest.approx(loss["entropy"])


def learner_mean(model_dir: Path, rows: Rows, temperature: float) -> float:
    learner = TorchLearner(str(model_dir), lr=0.1, dtype="float32", temperature=temperature, threads=1)
    return float(learner.logprobs(rows)[rows.mask].mean())


def test_entropy_is_that_of_the_predicting_distributions(tiny: Path) -> None:
    rows = sampled(1, 5, 3, 6)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    entropies = []
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))
        each = torch.distributions.Categorical(logits=model(ids[None]).logits[0, :-1]).entropy()
        entropies += each[torch.from_numpy(rows.mask[start + 1 : stop])].tolist()
    learner = TorchLearner(str(tiny), lr=0.1, dtype="float32", threads=1)
    assert learner.step(rows, LOSS)["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)


def test_bfloat16_is_near_float32(tiny: Path) -> None:
    rows = sampled(2, 12, 4, 8)
    _, gradient, _ = plain_gradient(tiny, rows)
    for how in PACKINGS:
        _, ours = our_gradient(TorchLearner(str(tiny), lr=0.1, pack=how, threads=1), rows)
        flat, reference = (torch.cat([g[name].flatten() for name in gradient]) for g in (ours, gradient))
        assert torch.cosine_similarity(flat, reference, dim=0) > 0.995


def test_adamw_equals_torchs_with_the_gradient_clipped_once() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(40, 30)), torch.nn.Parameter(torch.randn(7))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = MasterAdamW(ours, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=1.0, warmup=2)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
    for step, scale in enumerate([5.0, 0.001, 2.0]):
        gradients = [torch.randn_like(p) * scale for p in ours]
        for _ in range(2):  # two micro-batches
            for parameter, gradient in zip(ours, gradients, strict=True):
                # As autograd does it: what is there already stays.
                parameter.grad = gradient / 2 if parameter.grad is None else parameter.grad + gradient / 2
            optimizer.accumulate()
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        for group in reference.param_groups:
            group["lr"] = 0.1 * min(1, (step + 1) / 2)
        expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        reference.step()
        norm, lr = optimizer.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert lr == pytest.approx(0.1 * min(1, (step + 1) / 2))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
