"""However a batch is split, ordered and laid out, loss, gradient and metrics are the same: in float64 to 1e-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learner_rows import PACKINGS
from tiny_llama import SIZES, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Starcoder2Config

from flowgraph import TokenLoss, Tokens
from flowgraph.learners.aggregate import divisor
from flowgraph.learners.metrics import metrics_of, totals
from flowgraph.learners.protocol import Aggregation, Rows
from flowgraph.learners.rows import take
from flowgraph.learners.torch import TorchLearner
from hops.loss import cispo, gspo, policy_gradient

LOSSES: dict[str, TokenLoss] = {
    "ppo": policy_gradient(old="rollout", clip_dual=1.5),
    "gspo": gspo(clip_low=0.1, clip_high=0.1),
    "cispo, entropy": cispo(old="rollout", clip_high=0.5, entropy_coef=0.1),
    "tokens dropped": policy_gradient(weight="token", weight_outside="drop", kl="k2", kl_coef=0.1),
    "sequences dropped": policy_gradient(weight="sequence", weight_outside="drop", weight_max=3.0),
}
MODES: tuple[Aggregation, ...] = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
LENGTH = 7


class Found(NamedTuple):
    loss: float
    gradient: Tensor
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes in the dtype it is given, through and through: a Llama's norms are float32."""
    small = SIZES | {"hidden_size": 16, "intermediate_size": 16}
    small |= {"residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": None}
    del small["head_dim"]
    return save_model(tmp_path_factory.mktemp("float64"), Starcoder2Config(**small))


@pytest.fixture(scope="module")
def learners(model: Path) -> dict[str, TorchLearner]:
    return {how: TorchLearner(str(model), lr=1.0, dtype="float64", pack=how, threads=1) for how in PACKINGS}


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Trajectories of one to three leaves over few tokens, sharing prefixes in all ways, masks with holes or empty; a
    token at least is kept by every loss: one that is worth something and was sampled with its present probability.
    """
    leaf = st.lists(st.integers(0, 3), min_size=2, max_size=8)
    many = draw(st.lists(st.lists(leaf, min_size=1, max_size=3), min_size=1, max_size=4))
    tokens = [leaf for leaves in many for leaf in leaves]
    of = np.repeat(np.arange(len(many)) * 5 + 2, [len(leaves) for leaves in many])
    masks = [
        np.array([0, *draw(st.lists(st.integers(0, 1), min_size=len(t) - 1, max_size=len(t) - 1))], bool)
        for t in tokens
    ]
    masks[0][-1] = True
    random = np.random.default_rng(draw(st.integers(0, 99)))
    offsets = np.cumsum([0, *map(len, tokens)])
    fields = {
        "advantages": random.normal(size=offsets[-1]),
        "logprobs": -5 - random.normal(size=offsets[-1]),
        "reference": -5 - random.normal(size=offsets[-1]),
    }
    flat = np.concatenate(tokens).astype(np.int32)
    return Rows(flat, offsets, np.concatenate(masks), fields, trajectory=of)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=batches(),
    loss=st.sampled_from(sorted(LOSSES)),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 40),
    random=st.randoms(use_true_random=False),
)
def test_ranks_caps_order_and_packing_change_neither_loss_nor_gradient(
    learners: dict[str, TorchLearner],
    plain: Any,
    rows: Rows,
    loss: str,
    mode: Aggregation,
    ranks: int,
    max_tokens: int,
    random: Any,
) -> None:
    expected = by_rows(plain, rows, LOSSES[loss], mode)
    leaves = random.sample(range(len(rows.offsets) - 1), len(rows.offsets) - 1)
    assert rows.trajectory is not None
    rank_of = {int(name): random.randrange(ranks) for name in np.unique(rows.trajectory)}
    shards = [
        take(rows, [leaf for leaf in leaves if rank_of[int(rows.trajectory[leaf])] == rank])
        for rank in range(ranks)
    ]
    for learner in learners.values():
        learner._max_tokens = max_tokens
        found = by_shards(learner, shards, LOSSES[loss], mode)
        assert found.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-13)
        distance = torch.linalg.vector_norm(found.gradient - expected.gradient)
        assert distance <= 1e-12 * max(1e-2, torch.linalg.vector_norm(expected.gradient))
        for name, value in expected.metrics.items():
            assert found.metrics[name] == pytest.approx(value, rel=1e-12, abs=1e-13), name


def by_shards(learner: TorchLearner, shards: list[Rows], loss: TokenLoss, mode: Aggregation) -> Found:
    """What ranks would do, one after the other."""
    parts, gradients = [], []
    for shard in shards:
        parts.append(learner.accumulate(shard, loss, aggregate=mode))
        gradients.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten().clone()
                    for p, g in zip(learner._model.parameters(), learner._optimizer._gradients(), strict=True)
                ]
            )
        )
        learner._optimizer.drop()
    total = totals(parts)
    by = divisor(
        mode,
        LENGTH if mode.endswith("norm") else None,
        total.sums["kept_tokens"],
        total.sums["kept_sequences"],
    )
    scale = 1 / by if by else 0.0
    return Found(
        total.sums["loss"] * scale,
        torch.stack(gradients).sum(0).detach() * scale,
        metrics_of(total, by),
    )


def by_rows(model: Any, rows: Rows, loss: TokenLoss, mode: Aggregation) -> Found:
    """Each row through the model by itself, all tokens through the loss at once, and the formulas of `Aggregation`."""
    logprobs, entropy = [], []
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))
        every = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1], -1)
        none = torch.zeros(1, dtype=torch.float64)
        logprobs.append(torch.cat([none, every.gather(1, ids[1:, None])[:, 0]]))
        entropy.append(torch.cat([none, -(every.exp() * every).sum(-1)]))
    mask = torch.from_numpy(rows.mask)
    names, of = np.unique(
        np.repeat(np.asarray(rows.trajectory), np.diff(rows.offsets))[rows.mask], return_inverse=True
    )
    tokens = Tokens(
        torch.cat(logprobs)[mask],
        torch.cat(entropy)[mask],
        {name: torch.from_numpy(values[rows.mask]) for name, values in rows.fields.items()},
        torch.from_numpy(of),
        len(names),
    )
    said = loss(tokens)
    kept = torch.ones(len(of), dtype=torch.bool) if said.kept is None else said.kept
    sequences = [said.loss[kept & (tokens.sequence == i)] for i in range(len(names))]
    sequences = [values for values in sequences if len(values)]
    value = (
        {
            "token-mean": lambda: torch.cat(sequences).mean(),
            "seq-mean-token-mean": lambda: torch.stack([values.mean() for values in sequences]).mean(),
            "seq-mean-token-sum": lambda: torch.stack([values.sum() for values in sequences]).mean(),
            "seq-mean-token-sum-norm": lambda: torch.stack([v.sum() / LENGTH for v in sequences]).mean(),
        }[mode]()
        if sequences
        else 0 * said.loss.sum()
    )
    model.zero_grad()
    value.backward()
    metrics = {
        name: values.detach().mean().item() for name, values in {**said.metrics, **said.spread}.items()
    }
    metrics |= {f"{n}_p95": torch.quantile(values.detach(), 0.95).item() for n, values in said.spread.items()}
    metrics["entropy"] = tokens.entropy.detach().mean().item()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return Found(value.item(), gradient, metrics)


def test_the_mean_over_ranks_would_not_do(learners: dict[str, TorchLearner]) -> None:
    """L3: two ranks with 12 and 2 tokens; the sum over both is divided once."""
    long, short = [0, *range(1, 4)] * 4, [0, 1, 2]
    tokens = np.array([*long[:13], *short], np.int32)
    mask = np.array([False, *[True] * 12, False, True, True])
    fields = {"advantages": np.where(np.arange(16) < 13, 1.0, -3.0)}
    rows = Rows(tokens, np.array([0, 13, 16]), mask, fields)
    learner = learners["tree"]
    learner._max_tokens = 4096
    loss = policy_gradient()
    whole = by_shards(learner, [rows], loss, "token-mean")
    split = by_shards(learner, [take(rows, [0]), take(rows, [1])], loss, "token-mean")
    assert whole.loss == pytest.approx((-12 + 6) / 14)
    assert split.loss == pytest.approx(whole.loss, rel=1e-15)
    assert torch.linalg.vector_norm(split.gradient - whole.gradient) <= 1e-14 * torch.linalg.vector_norm(
        whole.gradient
    )
    alone = [by_shards(learner, [take(rows, [row])], loss, "token-mean").gradient for row in (0, 1)]
    assert torch.linalg.vector_norm(sum(alone) / 2 - whole.gradient) > 0.1 * torch.linalg.vector_norm(
        whole.gradient
    )


@pytest.mark.parametrize("how", PACKINGS)
def test_leaves_are_parted_by_the_cap_where_nothing_looks_across_a_trajectory(
    learners: dict[str, TorchLearner], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Three leaves of six tokens, five of which enter; the cap holds two of them side by side."""
    tokens = np.array(
        [leaf % 3 if at == 0 else (at + leaf) % 4 for leaf in range(3) for at in range(6)], np.int32
    )
    mask = np.tile(np.arange(6) > 0, 3)
    fields = {"advantages": np.ones(18), "logprobs": np.full(18, -1.4)}
    rows = Rows(tokens, np.arange(4) * 6, mask, fields, trajectory=np.array([7, 7, 7]))
    learner = learners[how]
    learner._max_tokens = 10

    def largest(loss: TokenLoss, mode: Aggregation) -> int:
        seen: list[int] = []
        forward = learner._place.forward
        learner._place.forward = lambda inputs: seen.append(inputs["position_ids"].numel()) or forward(inputs)
        try:
            by_shards(learner, [rows], loss, mode)
        finally:
            learner._place.forward = forward
        return max(seen)

    assert largest(policy_gradient(), "token-mean") == 10
    assert not caplog.records
    assert largest(policy_gradient(), "seq-mean-token-sum") == 15
    assert largest(gspo(), "token-mean") == 15
    assert [
        "a micro-batch has 15 positions, more than max_tokens 10" in r.message for r in caplog.records
    ] == [True] * 2
