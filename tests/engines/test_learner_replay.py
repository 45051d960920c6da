"""What rollout chose is what training executes: the forward, its gradient, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experts import save_experts
from learner_rows import (
    LOSS,
    PACKINGS,
    assert_same_gradient,
    digest,
    make_rows,
    our_gradient,
    sampled,
    token_mean,
)
from transformers import AutoModelForCausalLM

from flowgraph.errors import ModelError
from flowgraph.learners.protocol import Rows
from flowgraph.learners.torch import TorchLearner
from flowgraph.models.choices import Choices
from flowgraph.models.directory import read_tensors
from flowgraph.models.names import weights_of

MODELS = {
    "u8": {"kind": "qwen", "num_experts": 32, "num_hidden_layers": 3, "initializer_range": 0.1},
    "u16": {"kind": "glm", "num_hidden_layers": 3, "initializer_range": 0.1},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("experts")
    return {name: save_experts(where / name, **more) for name, more in MODELS.items()}


def learner(model: Path, how: Any = "tree", dtype: str = "float32", **more: Any) -> TorchLearner:
    return TorchLearner(str(model), **{"lr": 1e-3, "dtype": dtype, "pack": how, "threads": 1} | more)


def routed(model: Path, rows: Rows, *, random: int | None = None, dtype: str = "float32") -> Rows:
    """The rows with what the model chooses for each row by itself, or with a random choice; not of its last token."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    choices = Choices(whole)
    values = np.zeros((len(rows.tokens), choices.layers, choices.top_k), np.uint16)
    recorded = np.zeros(len(rows.tokens), np.bool_)
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))
        with torch.no_grad(), choices.capture() as captured:
            whole(input_ids=ids[None], use_cache=False)
        values[start:stop] = captured.indices.numpy()
        recorded[start : stop - 1] = True
    if random is not None:
        pick = np.random.default_rng(random)
        shape = (len(rows.tokens), choices.layers, choices.experts)
        values = pick.random(shape).argsort(axis=-1)[..., : choices.top_k].astype(np.uint16)
    values[~recorded] = 0
    return rows._replace(side={"routed_experts": values}, recorded=recorded)


@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_executes_what_was_recorded_whatever_it_is(
    models: dict[str, Path], kind: str, how: Any, dtype: str
) -> None:
    rows = routed(models[kind], sampled(2, 5, 2, 6), random=1)
    assert rows.recorded is not None
    trained = learner(models[kind], how, dtype, max_tokens=24)
    found = trained.step(rows, LOSS)
    assert found["routing_mismatch"] == 0
    assert found["recorded"] == 1
    without = learner(models[kind], how, dtype, max_tokens=24).step(rows, LOSS, replay=False)
    assert without["routing_mismatch"] > 0.9  # a random choice is seldom its own
    assert without["logprob_gap"] != found["logprob_gap"]


@pytest.mark.parametrize("how", PACKINGS)
def test_its_own_choice_put_in_gives_its_own_bits(models: dict[str, Path], how: Any) -> None:
    rows = sampled(2, 5, 2, 6)
    trained = learner(models["u8"], how)
    own = routed(models["u8"], rows)
    assert trained.logprobs(own).tobytes() == trained.logprobs(rows).tobytes()
    assert trained.step(own, LOSS, replay=False)["routing_mismatch"] == 0


@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_gradient_is_that_of_each_row_by_itself_with_its_experts_put_in(
    models: dict[str, Path], kind: str, how: Any
) -> None:
    """Rows of one group share tokens, and none of their routing: each is trained with its own."""
    rows = routed(models[kind], sampled(2, 5, 3, 6), random=2)
    assert rows.recorded is not None
    rows.recorded[::7] = False  # where nothing is recorded, the model's own choice counts
    loss, gradient = our_gradient(learner(models[kind], how), rows)
    plain = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    choices, parts = Choices(plain), []
    values = torch.from_numpy(rows.side["routed_experts"].astype(np.int64))
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))
        with choices.force(values[start:stop], torch.from_numpy(rows.recorded[start:stop])):
            logits = plain(input_ids=ids[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1), logprobs]))
    logprobs = torch.cat(parts)[torch.from_numpy(rows.mask)]
    fields = {name: torch.from_numpy(values[rows.mask]) for name, values in rows.fields.items()}
    value = token_mean(LOSS, logprobs, fields)
    value.backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
    assert loss == pytest.approx(float(value.detach()), rel=1e-5)
    assert_same_gradient(gradient, wanted, 1e-4)
    routers = [name for name in wanted if name.endswith("gate.weight")]
    assert routers
    assert all(wanted[name].abs().max() > 0 for name in routers)  # the gradient reaches the routers


def test_equal_rows_of_two_routings_are_scored_by_their_own(models: dict[str, Path]) -> None:
    twice = make_rows([[5, 6, 7, 8, 9]] * 2, [[0, 0, 0, 1, 1]] * 2)
    rows = routed(models["u8"], twice, random=3)
    padded, packed, tree = (learner(models["u8"], how).logprobs(rows).reshape(2, -1) for how in PACKINGS)
    np.testing.assert_allclose(tree, padded, atol=1e-5)
    np.testing.assert_allclose(packed, padded, atol=1e-5)
    assert np.abs(tree[0] - tree[1])[3:].min() > 1e-3


@pytest.mark.parametrize("how", PACKINGS)
def test_replay_closes_the_gap_between_a_bfloat16_rollout_and_float32_training(
    models: dict[str, Path], how: Any
) -> None:
    rows = routed(models["u8"], sampled(4, 12, 3, 24), dtype="bfloat16")
    sampled_with = learner(models["u8"], how, "bfloat16").logprobs(rows)
    trained = learner(models["u8"], how)
    gaps = [
        np.abs(trained.logprobs(rows, replay=replay) - sampled_with)[rows.mask].mean()
        for replay in (True, False)
    ]
    assert gaps[0] < gaps[1] / 1.5
    assert trained.step(rows, LOSS, replay=False)["routing_mismatch"] > 0.005


@pytest.mark.parametrize("how", PACKINGS)
def test_a_step_that_fails_leaves_the_model_to_choose_for_itself(models: dict[str, Path], how: Any) -> None:
    plain = sampled(2, 5, 2, 6)
    trained = learner(models["u8"], how)
    before, weights = trained.logprobs(plain).tobytes(), digest(trained.weights())
    rows = routed(models["u8"], plain, random=4)

    def fails(tokens: Any) -> Any:
        raise ArithmeticError("no loss today")

    with pytest.raises(ArithmeticError):
        trained.step(rows, fails)
    values = rows.side["routed_experts"].copy()
    values[1, 2, 0] = 32
    with pytest.raises(ValueError, match="expected 0 to 31"):
        trained.step(rows._replace(side={"routed_experts": values}), LOSS)
    assert trained.logprobs(plain).tobytes() == before
    assert digest(trained.weights()) == weights


def test_rows_of_which_nothing_was_recorded_train_as_without_a_channel(models: dict[str, Path]) -> None:
    plain = sampled(2, 5, 2, 6)
    rows = routed(models["u8"], plain, random=5)
    rows = rows._replace(recorded=np.zeros(len(rows.tokens), np.bool_))
    one, other = learner(models["u8"]), learner(models["u8"])
    found = one.step(rows, LOSS)
    assert found.pop("recorded") == 0
    assert found == other.step(plain, LOSS)  # with no mismatch, as nothing was compared
    assert digest(one.weights()) == digest(other.weights())


def test_weights_are_given_in_the_dtype_of_who_gets_them(models: dict[str, Path]) -> None:
    trained = learner(models["u8"], weights_dtype="bfloat16")
    whole = AutoModelForCausalLM.from_pretrained(models["u8"], dtype=torch.bfloat16)
    names = read_tensors(models["u8"]).keys()
    assert digest(trained.weights()) == digest(weights_of(whole, names))


def test_a_channel_that_cannot_be_replayed_is_refused_by_name(tiny: Path, models: dict[str, Path]) -> None:
    rows = routed(models["u8"], sampled(1, 3, 1, 3))
    values = rows.side["routed_experts"]
    with pytest.raises(ModelError, match="LlamaForCausalLM has no layer with experts"):
        learner(tiny).step(rows, LOSS)
    with pytest.raises(ValueError, match=r"must be \[token, 3 layers, 4\] for this model, not \[\d, 3, 2\]"):
        learner(models["u16"]).step(rows, LOSS)
    with pytest.raises(ValueError, match="replays routed_experts and indexer_topk, and no other"):
        learner(models["u8"]).step(rows._replace(side={"other": values}), LOSS)
    with pytest.raises(ModelError, match="Qwen3MoeForCausalLM has 0 indexers in 3 layers"):
        learner(models["u8"]).step(rows._replace(side={"indexer_topk": values}), LOSS)
