"""Weights of models with experts cross by the names of their files, whatever transformers makes of them in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experts import save_experts
from learner_rows import LOSS, digest, sampled
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowgraph.engines.transformers import TransformersEngine
from flowgraph.engines.weights.delta import encode
from flowgraph.learners.torch import TorchLearner
from flowgraph.models import ensure, facts
from flowgraph.models.directory import read_tensors
from flowgraph.models.names import by_file_name


@pytest.fixture(params=["tiny-moe", "tiny-moe-300"])
def made(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine_of(model_dir: str | Path, dtype: str = "bfloat16") -> TransformersEngine:
    return TransformersEngine(str(model_dir), slots=2, context=32, dtype=dtype, threads=1)


def learner_of(model_dir: str | Path, dtype: str = "bfloat16") -> TorchLearner:
    return TorchLearner(str(model_dir), lr=1e-2, dtype=dtype, threads=1)


def test_a_learner_hands_on_what_the_plan_says_without_a_copy(made: str) -> None:
    shipped = facts(made)
    assert shipped is not None
    learner = learner_of(ensure(made, progress=False).path)
    before = learner.weights()
    assert {n: tuple(t.shape) for n, t in before.items()} == {t.name: t.shape for t in shipped.tensors}
    assert all(t.is_contiguous() for t in before.values())
    was = digest(before)
    learner.step(sampled(1, 5, 2, 6), LOSS)
    assert digest(before) == digest(learner.weights()) != was


def test_an_engine_serves_what_was_trained_and_so_does_what_was_saved(made: str, tmp_path: Path) -> None:
    where = ensure(made, progress=False).path
    learner, engine = learner_of(where), engine_of(where)
    assert digest(engine.weights()) == digest(learner.weights())
    learner.step(sampled(1, 5, 2, 6), LOSS)
    engine.pause("retract")
    engine.update_weights(learner.weights(), 1)
    assert digest(engine.weights()) == digest(learner.weights())
    learner.save(str(tmp_path / "out"))
    assert digest(engine_of(tmp_path / "out").weights()) == digest(learner.weights())
    tokens = np.arange(3, 19, dtype=np.int32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    logits = plain(torch.tensor(tokens[None].astype(np.int64))).logits[0, :-1].float().log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(tokens[1:, None].astype(np.int64)))[:, 0]
    np.testing.assert_allclose(engine.logprobs(tokens)[1:], wanted.detach().numpy(), atol=0.1)


def test_what_changed_is_enough() -> None:
    where = ensure("tiny-moe", progress=False).path
    learner, engine = learner_of(where), engine_of(where)
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    learner.step(sampled(1, 5, 2, 6), LOSS)
    engine.pause("in_place")
    engine.change_weights(encode(before, learner.weights(), base=0, version=1))
    assert digest(engine.weights()) == digest(learner.weights())


def test_buffers_that_the_files_hold_are_weights_too(tmp_path: Path) -> None:
    """GLM's routers add a bias to their scores that is no parameter."""
    where = save_experts(tmp_path / "glm", "glm", num_hidden_layers=2)
    learner, engine = learner_of(where, "float32"), engine_of(where, "float32")
    assert learner.weights().keys() == read_tensors(where).keys()
    assert any(name.endswith("e_score_correction_bias") for name in learner.weights())
    learner.step(sampled(1, 5, 2, 6), LOSS)
    engine.pause("retract")
    engine.update_weights(learner.weights(), 1)
    assert digest(engine.weights()) == digest(learner.weights())


def _without(name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in weights.items() if n != name}


def test_one_expert_that_is_missing_or_of_another_shape_is_named() -> None:
    engine = engine_of(ensure("tiny-moe", progress=False).path)
    engine.pause("retract")
    weights: dict[str, Any] = {n: t.clone() for n, t in engine.weights().items()}
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    with pytest.raises(ValueError, match=f"^no weight was changed: '{name}' is missing$"):
        engine.update_weights(_without(name, weights), 1)
    with pytest.raises(ValueError, match=rf"'{name}' is torch.bfloat16 \[64, 32\], the model's is"):
        engine.update_weights(weights | {name: weights[name].mT}, 1)


def test_a_model_whose_files_have_its_experts_fused_keeps_those_names() -> None:
    fused = torch.zeros(3, 4, 5)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert by_file_name({name: fused}, {name}).keys() == {name}
    assert by_file_name({name: fused}, {"model.layers.0.mlp.experts.w1"}).keys() == {name}
