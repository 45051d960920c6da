"""The critic: values and their gradient by plain Hugging Face code, what it refuses, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_rows import LOSS, PACKINGS, assert_same_gradient, make_rows, our_gradient, sampled
from torch import Tensor
from transformers import AutoModelForTokenClassification, GraniteConfig

from flowgraph.learners.protocol import Rows
from flowgraph.learners.registry import LoraOptions, TorchOptions, create_learner
from flowgraph.learners.torch import TorchLearner
from flowgraph.learners.value import ValueLearner
from hops.value import estimate, fit, squared_error

PLAIN = squared_error(clip=None)
every_packing = pytest.mark.parametrize("how", PACKINGS)


def critic(where: Path, **options: Any) -> ValueLearner:
    return ValueLearner(str(where), **{"lr": 1e-2, "dtype": "float32", "threads": 1} | options)


def with_returns(rows: Rows) -> Rows:
    returns = np.random.default_rng(1).standard_normal(len(rows.tokens)).astype(np.float32)
    return rows._replace(fields={"returns": returns, "values": np.zeros_like(returns)})


def forked() -> Rows:
    """Two groups, of which a trajectory's second leaf trains only its own branch, and a row that trains nothing."""
    tokens = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8], [1, 2, 7], [6, 6, 5, 5], [6, 6]]
    masks = [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 1], [0, 1, 0, 1], [0, 0]]
    return with_returns(make_rows(tokens, masks))


def plain(model_dir: str, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Values of the masked tokens, and the gradient of the mean loss, row by row with nothing of ours but the loss."""
    model = AutoModelForTokenClassification.from_pretrained(model_dir, dtype=torch.float32).eval()
    parts = []
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))
        value_L = model(input_ids=ids[None], use_cache=False).logits[0, :, 0]
        parts.append(torch.cat([torch.zeros(1), value_L[:-1]]))
    mask = torch.from_numpy(rows.mask)
    values = torch.cat(parts)[mask]
    loss = 0.5 * (values - torch.from_numpy(rows.fields["returns"])[mask]) ** 2
    loss.mean().backward()
    return values.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@every_packing
@pytest.mark.parametrize("max_tokens", [4096, 6])
def test_values_and_gradient_are_those_of_plain_code(
    tiny: Path, tmp_path: Path, how: Any, max_tokens: int
) -> None:
    """B8: a value is read where the token's log-probability is, whatever the rows share and however they are split."""
    learner = critic(tiny, pack=how, max_tokens=max_tokens)
    learner.save(str(tmp_path / "critic"))
    rows = forked()
    values, gradient = plain(str(tmp_path / "critic"), rows)
    found = learner.values(rows)
    np.testing.assert_allclose(found[rows.mask], values, atol=1e-5)
    assert not found[~rows.mask].any()
    _, ours = our_gradient(learner, rows, PLAIN)
    assert_same_gradient(ours, gradient, 1e-4)


@every_packing
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls_on_a_fixed_batch(tiny: Path, how: Any, dtype: str) -> None:
    learner, rows = critic(tiny, pack=how, dtype=dtype), with_returns(sampled(2, 5, 2, 6))
    before = learner.values(rows)
    losses = [learner.step(rows, PLAIN)["loss"] for _ in range(30)]
    mean = 0.5 * np.square(before - rows.fields["returns"])[rows.mask].mean()
    assert losses[0] == pytest.approx(mean, rel=1e-2)
    assert losses[-1] < 0.05 * losses[0]
    assert np.abs(learner.values(rows) - rows.fields["returns"])[rows.mask].max() < 0.3


def test_a_fit_takes_its_epochs_on_one_batch_and_clips_from_the_second(tiny: Path) -> None:
    learner, rows = critic(tiny), with_returns(sampled(2, 5, 2, 6))
    batch, returns = (rows.tokens, rows.offsets, rows.mask), rows.fields["returns"]
    values = estimate(*batch, critic=learner).values
    assert values.tolist() == learner.values(rows).tolist()
    first = fit(*batch, values, returns, critic=learner, clip=1e-4).metrics
    assert first["clipped"] == 0
    left = (returns - values)[rows.mask]
    assert first["loss"] == pytest.approx(0.5 * np.square(left).mean(), rel=1e-5)
    assert first["value"] == pytest.approx(values[rows.mask].mean(), rel=1e-5)
    explained = 1 - left.var() / returns[rows.mask].var()
    assert first["explained_variance"] == pytest.approx(explained, rel=1e-5)
    again = fit(*batch, values, returns, critic=learner, clip=1e-4, epochs=3).metrics
    assert again["clipped"] > 0.2
    assert again["explained_variance"] == first["explained_variance"]  # of the values that were given
    same = fit(*batch, values, np.ones_like(returns), critic=learner).metrics
    assert "explained_variance" not in same  # there is nothing to explain


def test_a_critic_is_saved_as_others_load_it_and_goes_on_from_there(tiny: Path, tmp_path: Path) -> None:
    learner, rows = critic(tiny), forked()
    learner.step(rows, PLAIN)
    learner.save(str(tmp_path / "critic"))
    again = critic(tmp_path / "critic")
    assert again.values(rows).tolist() == learner.values(rows).tolist()
    values, _ = plain(str(tmp_path / "critic"), rows)
    np.testing.assert_allclose(learner.values(rows)[rows.mask], values, atol=1e-5)
    assert (tmp_path / "critic" / "tokenizer.json").exists()


def test_a_new_critic_is_the_same_in_every_run_and_loads_without_a_word(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    one = critic(tiny).values(forked())
    torch.manual_seed(2)
    assert critic(tiny).values(forked()).tolist() == one.tolist()
    assert "MISSING" not in "".join(capfd.readouterr())


def test_a_batch_of_no_mask_takes_no_step(tiny: Path) -> None:
    """L5"""
    learner, rows = critic(tiny), forked()
    before = learner.values(rows)
    assert learner.step(rows._replace(mask=np.zeros_like(rows.mask)), PLAIN)["skipped"] == 1
    assert learner.values(rows).tolist() == before.tolist()


def test_a_loss_for_the_other_kind_of_head_is_refused_by_name(tiny: Path) -> None:
    with pytest.raises(ValueError, match="reads log-probabilities, and a critic has none"):
        critic(tiny).step(sampled(1, 3, 1, 2), LOSS)
    learner = TorchLearner(str(tiny), lr=1e-3, threads=1)
    with pytest.raises(ValueError, match="the loss reads values, and this learner has none; set head: value"):
        learner.step(forked(), PLAIN)
    with pytest.raises(NotImplementedError, match="a critic has values and no log-probabilities"):
        critic(tiny).logprobs(forked())


def test_options_and_models_of_which_no_critic_is_made(tiny: Path, save: Any) -> None:
    made = create_learner(TorchOptions(model="m", lr=1e-3, head="value"), str(tiny), threads=1)
    assert isinstance(made, ValueLearner)
    for option in ({"temperature": 0.5}, {"weights_dtype": "float32"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} says nothing beside head: value"):
            TorchOptions(model="m", lr=1e-3, head="value", **option)
    with pytest.raises(ValueError, match="the head of a critic is new and is trained whole; leave out lora"):
        TorchOptions(model="m", lr=1e-3, head="value", lora=LoraOptions(rank=2, alpha=4))
    with pytest.raises(NotImplementedError, match="no token classification for granite models"):
        critic(save(GraniteConfig))
