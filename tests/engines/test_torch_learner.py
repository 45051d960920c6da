"""What the torch learner does around its gradient: steps, refusals, files, bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_rows import (
    LOSS,
    PACKINGS,
    digest,
    frozen_learners,
    make_rows,
    our_gradient,
    sampled,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, MistralConfig

from flowgraph.learners.protocol import Losses, Tokens
from flowgraph.learners.torch import TorchLearner


@pytest.fixture(scope="module")
def learners(tiny: Path) -> dict[str, TorchLearner]:
    return frozen_learners(tiny)


@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_raise_the_probability_of_what_had_a_positive_advantage(
    tiny: Path, how: Any, dtype: str
) -> None:
    learner = TorchLearner(str(tiny), lr=3e-3, dtype=dtype, pack=how, threads=1)
    rows = sampled(2, 5, 2, 6)
    rows.fields["advantages"][:] = 1.0
    before = learner.logprobs(rows)[rows.mask].mean()
    metrics = [learner.step(rows, LOSS) for _ in range(5)][-1]
    assert learner.logprobs(rows)[rows.mask].mean() > before + 0.5
    assert metrics["tokens"] == rows.mask.sum()
    assert metrics["rows"] == 4
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-9)
    assert metrics["skipped"] == 0
    assert 0 < metrics["entropy"] < np.log(260)
    assert metrics["lr"] == 3e-3


@pytest.mark.parametrize("how", PACKINGS)
def test_L5_a_batch_of_no_mask_takes_no_step_and_warns(
    tiny: Path, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner = TorchLearner(str(tiny), lr=0.1, pack=how, threads=1)
    before = digest(learner.weights())
    metrics = learner.step(make_rows([[1, 2], [3]], [[0, 0], [0]]), LOSS)
    assert metrics["skipped"] == 1
    assert metrics["tokens"] == metrics["loss"] == metrics["grad_norm"] == 0
    assert digest(learner.weights()) == before
    assert "no token of the batch of 2 rows is trained on" in caplog.text


def test_float32_masters_keep_what_bfloat16_would_round_away(tiny: Path) -> None:
    learner = TorchLearner(str(tiny), lr=1e-5, threads=1)
    rows = sampled(2, 5, 2, 6)
    before = {name: w.clone() for name, w in learner.weights().items()}
    for _ in range(60):
        learner.step(rows, LOSS)
    name = "model.layers.0.mlp.up_proj.weight"
    changed = (learner.weights()[name] != before[name]).float().mean()
    assert changed > 0.2  # steps of 1e-5 are below half a bfloat16 step of most weights


@pytest.mark.parametrize("how", PACKINGS)
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(tiny: Path, how: Any) -> None:
    rows = sampled(2, 5, 2, 6)
    learner = TorchLearner(str(tiny), lr=0.1, dtype="float32", pack=how, threads=1, max_tokens=16)
    before = digest(learner.weights())

    def infinite_loss(tokens: Tokens) -> Losses:
        most = tokens.fields["advantages"] == tokens.fields["advantages"].max()
        return Losses(tokens.logprobs * torch.where(most, torch.inf, 1))

    def infinite_gradient(tokens: Tokens) -> Losses:
        return Losses((tokens.logprobs - tokens.logprobs.detach()).abs().sqrt())

    with pytest.raises(FloatingPointError, match="the loss is"):
        learner.step(rows, infinite_loss)
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        learner.step(rows, infinite_gradient)
    with pytest.raises(ValueError, match=r"returned shape \[\]"):
        learner.step(rows, lambda tokens: Losses(tokens.logprobs.sum()))
    assert digest(learner.weights()) == before
    clean = TorchLearner(str(tiny), lr=0.1, dtype="float32", pack=how, threads=1, max_tokens=16)
    assert learner.step(rows, LOSS) == clean.step(rows, LOSS)
    assert digest(learner.weights()) == digest(clean.weights())


def test_arrays_that_cannot_be_written_are_fine(learners: dict[str, TorchLearner]) -> None:
    rows = sampled(1, 4, 2, 3)
    for values in (rows.tokens, rows.offsets, rows.mask, *rows.fields.values()):
        values.flags.writeable = False
    for learner in learners.values():
        our_gradient(learner, rows)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from learner_rows import LOSS, TorchLearner, digest, sampled
learner = TorchLearner(sys.argv[1], lr=1e-3, threads=2, max_tokens=60)
rows = sampled(3, 12, 4, 9)
print(*[learner.step(rows, LOSS) for _ in range(2)], digest(learner.weights()))
"""


def test_the_same_inputs_give_the_same_bits_in_another_process(tiny: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny), str(Path(__file__).parent)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    one, other = (process.communicate()[0] for process in processes)
    assert one == other
    assert len(one) > 100


@pytest.mark.parametrize("how", PACKINGS)
def test_save_writes_a_directory_that_loads_with_its_tokenizer(tiny: Path, tmp_path: Path, how: Any) -> None:
    learner = TorchLearner(str(tiny), lr=0.1, pack=how, threads=1)
    target = tmp_path / "new" / "model"
    for _ in range(2):  # the second replaces the first
        learner.step(sampled(1, 5, 2, 6), LOSS)
        learner.save(str(target))
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert digest(dict(loaded.named_parameters())) == digest(learner.weights())
    assert AutoTokenizer.from_pretrained(target).encode("ab") == AutoTokenizer.from_pretrained(tiny).encode(
        "ab"
    )
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    again = TorchLearner(str(target), lr=0.1, pack=how, threads=1)
    assert digest(again.weights()) == digest(learner.weights())


def test_weights_name_the_tied_matrix_once(tiny: Path) -> None:
    learner = TorchLearner(str(tiny), lr=0.1, threads=1)
    weights = learner.weights()
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    learner.close()
    learner.close()


def test_a_model_that_the_packing_does_not_fit_is_refused(save: Callable[..., Path]) -> None:
    windowed = str(save(MistralConfig, sliding_window=8))
    with pytest.raises(NotImplementedError, match="sliding_window; use pack='padded'"):
        TorchLearner(windowed, lr=0.1, threads=1)
    TorchLearner(windowed, lr=0.1, pack="padded", threads=1)
    scaled = str(save(GraniteConfig, logits_scaling=8.0))
    for how in PACKINGS:
        with pytest.raises(NotImplementedError, match=f"GraniteForCausalLM does not fit pack='{how}'"):
            TorchLearner(scaled, lr=0.1, pack=how, threads=1)


@pytest.mark.parametrize(
    "config",
    [{"dtype": "float16"}, {"pack": "flat"}, {"max_tokens": 0}, {"clip": 0}, {"lr": -1}, {"temperature": 0}],
)
def test_a_bad_configuration_is_refused_by_name(tiny: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        TorchLearner(str(tiny), **{"lr": 0.1, **config})


def test_a_missing_directory_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="no model directory"):
        TorchLearner("/nowhere", lr=0.1)
