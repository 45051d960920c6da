"""The torch learner against a plain Hugging Face forward and backward pass, row by row."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, LlamaConfig, MistralConfig

from flowgraph.learners import head as head_module
from flowgraph.learners.head import Head, Targets
from flowgraph.learners.optim import MasterAdamW
from flowgraph.learners.protocol import Rows
from flowgraph.learners.torch import TorchLearner
from hops.loss import policy_gradient

PACKINGS = ("padded", "tree")
LOSS = policy_gradient()


def make_rows(tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], seed: int = 0) -> Rows:
    flat = np.concatenate([np.array(row, np.int32) for row in tokens])
    random = np.random.default_rng(seed)
    fields = {
        "advantages": random.standard_normal(len(flat)).astype(np.float32),
        "logprobs": -random.random(len(flat)).astype(np.float32) * 8,
    }
    mask = np.concatenate([np.array(row, np.bool_) for row in masks])
    return Rows(flat, np.cumsum([0, *map(len, tokens)]), mask, fields)


def sampled(groups: int, prompt: int, samples: int, response: int, seed: int = 0) -> Rows:
    """Groups of samples that share a prompt, responses of up to `response` tokens."""
    random = np.random.default_rng(seed)
    tokens, masks = [], []
    for _ in range(groups):
        shared = random.integers(0, 256, prompt).tolist()
        for _ in range(samples):
            length = int(random.integers(1, response + 1))
            tokens.append(shared + random.integers(0, 256, length).tolist())
            masks.append([0] * prompt + [1] * length)
    return make_rows(tokens, masks, seed)


def reorder(rows: Rows, order: Sequence[int]) -> Rows:
    at = np.concatenate([np.arange(rows.offsets[i], rows.offsets[i + 1]) for i in order])
    lengths = [rows.offsets[i + 1] - rows.offsets[i] for i in order]
    fields = {name: values[at] for name, values in rows.fields.items()}
    return Rows(rows.tokens[at], np.cumsum([0, *lengths]), rows.mask[at], fields)


def plain_gradient(model_dir: Path, rows: Rows, loss: Any = LOSS) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradient and log-probabilities (of masked tokens) with nothing of ours but the loss."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    parts = []
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1), logprobs]))
    logprobs = torch.cat(parts)[torch.from_numpy(rows.mask)]
    fields = {name: torch.from_numpy(values[rows.mask]) for name, values in rows.fields.items()}
    value = loss(logprobs, torch.zeros(len(logprobs)), fields)[0].sum() / len(logprobs)
    value.backward()
    return float(value.detach()), {n: p.grad for n, p in model.named_parameters()}, logprobs.detach()


def our_gradient(learner: TorchLearner, rows: Rows, loss: Any = LOSS) -> tuple[float, dict[str, Tensor]]:
    """The gradient that the optimiser would get, and no step."""
    optimizer, found = learner._optimizer, {}

    def no_step() -> tuple[float, float]:
        names = [name for name, _ in learner._model.named_parameters()]
        found.update(zip(names, [g.float().clone() for g in optimizer._gradients()], strict=True))
        optimizer.drop()
        return 0.0, 0.0

    optimizer.step = no_step  # type: ignore[method-assign]
    try:
        return learner.step(rows, loss)["loss"], found
    finally:
        del optimizer.step


def assert_same_gradient(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float) -> None:
    """Relative per tensor; a tensor whose gradient cancels to nothing is measured against the whole model's."""
    assert one.keys() == other.keys()
    whole = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in other.values()]))
    for name in one:
        distance = torch.linalg.vector_norm(one[name] - other[name])
        assert distance <= tolerance * (torch.linalg.vector_norm(other[name]) + 0.1 * whole), name


def digest(weights: Mapping[str, Tensor]) -> str:
    parts = [weights[name].view(torch.uint8).numpy().tobytes() for name in sorted(weights)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.fixture(scope="module")
def learners(tiny: Path) -> dict[str, TorchLearner]:
    """One float32 learner per packing, for tests that take no step."""
    return {how: TorchLearner(str(tiny), lr=1e-3, dtype="float32", pack=how, threads=1) for how in PACKINGS}


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
        ours, our_grad = our_gradient(learner, reorder(rows, order), loss)
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
        loss += head.backward(torch.ones(n, 1), targets, {"advantages": values}, LOSS, total=4).loss
    assert loss == 0.5
    assert layer.weight.grad is not None
    assert layer.weight.grad[0].item() == 0.25


@pytest.mark.parametrize("how", PACKINGS)
def test_L4_rows_of_no_mask_change_nothing(learners: dict[str, TorchLearner], how: str) -> None:
    rows = make_rows([[1, 2, 3], [4, 5, 6], [7, 8]], [[0, 1, 1], [0, 0, 0], [0, 0]])
    learner = learners[how]
    learner._max_tokens = 3
    value, gradient = our_gradient(learner, rows)
    alone, alone_gradient = our_gradient(learner, reorder(rows, [0]))
    assert value == alone
    assert_same_gradient(gradient, alone_gradient, 0)


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
    loss = learner.step(rows, lambda logprobs, entropy, fields: (-logprobs, {"h": entropy}))
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


def test_float32_masters_keep_what_bfloat16_would_round_away(tiny: Path) -> None:
    learner = TorchLearner(str(tiny), lr=1e-5, threads=1)
    rows = sampled(2, 5, 2, 6)
    before = {name: w.clone() for name, w in learner.weights().items()}
    for _ in range(60):
        learner.step(rows, LOSS)
    name = "model.layers.0.mlp.up_proj.weight"
    changed = (learner.weights()[name] != before[name]).float().mean()
    assert changed > 0.2  # steps of 1e-5 are below half a bfloat16 step of most weights


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
                parameter.grad = gradient / 2
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


@pytest.mark.parametrize("how", PACKINGS)
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(tiny: Path, how: Any) -> None:
    rows = sampled(2, 5, 2, 6)
    learner = TorchLearner(str(tiny), lr=0.1, dtype="float32", pack=how, threads=1, max_tokens=16)
    before = digest(learner.weights())

    def infinite_loss(logprobs: Tensor, entropy: Tensor, fields: Any) -> Any:
        return logprobs * torch.where(fields["advantages"] == fields["advantages"].max(), torch.inf, 1), {}

    def infinite_gradient(logprobs: Tensor, entropy: Tensor, fields: Any) -> Any:
        return (logprobs - logprobs.detach()).abs().sqrt(), {}

    with pytest.raises(FloatingPointError, match="the loss is"):
        learner.step(rows, infinite_loss)
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        learner.step(rows, infinite_gradient)
    with pytest.raises(ValueError, match=r"returned shape \[\]"):
        learner.step(rows, lambda logprobs, entropy, fields: (logprobs.sum(), {}))
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
from test_torch_learner import LOSS, digest, sampled, TorchLearner
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
