"""hops.train: ports and options of a step, and a batch scored by another learner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_rows import digest, sampled

from flowgraph.engines.registry import TransformersOptions, start_engine
from flowgraph.learners.protocol import Rows
from flowgraph.learners.torch import TorchLearner
from hops.loss import policy_gradient
from hops.sync import publish
from hops.train import joined, score, step, validate


def learner(tiny: Path, **options: Any) -> TorchLearner:
    return TorchLearner(str(tiny), **{"lr": 1e-3, "dtype": "float32", "threads": 1} | options)


def given(rows: Rows) -> dict[str, Any]:
    columns = {"tokens": rows.tokens, "leaf_offsets": rows.offsets, "response_mask": rows.mask}
    return columns | dict(rows.fields)


def test_a_step_is_the_learners_and_gives_its_weights(tiny: Path) -> None:
    rows, loss = sampled(2, 5, 2, 6), policy_gradient()
    hop, plain = learner(tiny), learner(tiny)
    out = step(**given(rows), learner=hop, loss=loss, aggregate="seq-mean-token-sum-norm", length=6)
    assert out.metrics == plain.step(rows, loss, aggregate="seq-mean-token-sum-norm", length=6)
    assert digest(out.weights) == digest(plain.weights())


def test_L8_the_first_of_several_steps_is_on_policy_and_the_next_are_not(tiny: Path) -> None:
    """All compare with the batch's scores before the first, so the ratio moves away from 1."""
    rows, seen = sampled(4, 5, 2, 6), []
    plain = policy_gradient(clip_low=0.01, clip_high=0.01)

    def loss(tokens: Any) -> Any:
        said = plain(tokens)
        seen.append(float((said.spread["ratio"] - 1).abs().max()))
        return said

    one = learner(tiny, lr=1e-2)
    before = one.logprobs(rows)
    out = step(**given(rows), learner=one, loss=loss, minibatches=2)
    # Scored in another micro-batch than trained: the same but for rounding.
    assert seen[0] < 1e-5 < 1e-2 < seen[1]
    assert out.metrics["clipped"] > 0
    assert out.metrics["tokens"] == rows.mask.sum()
    assert out.metrics["ratio_max"] > 1.01
    assert np.abs(one.logprobs(rows) - before)[rows.mask].max() > 1e-2
    other = learner(tiny, lr=1e-2)
    same = step(**given(rows), old=before, learner=other, loss=plain, minibatches=2)
    assert digest(same.weights) == digest(out.weights)


def test_a_loss_that_reads_no_scores_of_the_learner_costs_none(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(tiny)
    monkeypatch.setattr(one, "logprobs", None)
    loss = policy_gradient(old="rollout")
    assert step(**given(sampled(2, 5, 2, 6)), learner=one, loss=loss, minibatches=2).metrics["rows"] == 4


def test_metrics_of_several_steps_are_sums_of_counts_maxima_and_means() -> None:
    one = {"loss": 1.0, "tokens": 4.0, "rows": 1.0, "positions": 9.0, "skipped": 0.0, "ratio_max": 2.0}
    two = {"loss": 3.0, "tokens": 2.0, "rows": 1.0, "positions": 3.0, "skipped": 0.0, "ratio_max": 5.0}
    none = {"loss": 0.0, "tokens": 0.0, "rows": 0.0, "positions": 0.0, "skipped": 1.0}
    assert joined([one, two, none]) == {
        "loss": 2.0,
        "tokens": 6.0,
        "rows": 2.0,
        "positions": 12.0,
        "skipped": 1.0,
        "ratio_max": 5.0,
    }
    assert joined([one]) is one


def test_a_reference_holds_the_policy_near(tiny: Path) -> None:
    """The same batches, with and without: the distance from the reference stays smaller, and is told."""
    rows = sampled(2, 5, 4, 6)
    frozen = learner(tiny)
    reference = score(rows.tokens, rows.offsets, rows.mask, learner=frozen).rescored
    assert (reference == frozen.logprobs(rows)).all()
    apart = {}
    for coefficient in (0.0, 1.0):
        one, loss = learner(tiny, lr=3e-3), policy_gradient(kl="k3", kl_coef=coefficient)
        metrics = [step(**given(rows), reference=reference, learner=one, loss=loss).metrics for _ in range(8)]
        assert metrics[0]["kl"] == pytest.approx(0, abs=1e-9)
        apart[coefficient] = metrics[-1]["kl"]
    assert 0 < apart[1.0] < 0.5 * apart[0.0]


def test_an_entropy_bonus_keeps_the_entropy_up(tiny: Path) -> None:
    rows, last = sampled(2, 5, 4, 6), {}
    for coefficient in (0.0, 1.0):
        one = learner(tiny, lr=3e-3)
        loss = policy_gradient(entropy_coef=coefficient)
        last[coefficient] = [step(**given(rows), learner=one, loss=loss).metrics["entropy"] for _ in range(5)]
    assert last[0.0][0] == last[1.0][0]
    assert last[1.0][-1] > last[0.0][-1] + 0.1


def test_leaves_of_one_trajectory_are_one_sequence(tiny: Path) -> None:
    rows = sampled(1, 5, 4, 6)
    loss, mode = policy_gradient(), "seq-mean-token-sum"
    apart = step(**given(rows), learner=learner(tiny), loss=loss, aggregate=mode).metrics["loss"]
    together = step(
        **given(rows), trajectory=np.array([1, 1, 2, 2]), learner=learner(tiny), loss=loss, aggregate=mode
    )
    assert together.metrics["loss"] == pytest.approx(2 * apart)


def test_L5_a_batch_of_which_the_loss_keeps_nothing_takes_no_step(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, one = sampled(2, 5, 2, 6), learner(tiny)
    rows.fields["logprobs"][:] = -50
    before = digest(one.weights())
    loss = policy_gradient(weight="token", weight_outside="drop")
    metrics = one.step(rows, loss)
    assert (metrics["skipped"], metrics["loss"], metrics["kept"]) == (1, 0, 0)
    assert metrics["tokens"] == rows.mask.sum()
    assert digest(one.weights()) == before
    assert "is trained on: no step taken" in caplog.text


def test_L5_the_version_counts_a_batch_that_trains_nothing(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No step and a warning; the engine then serves the same weights under the next version."""
    rows, one = sampled(2, 5, 2, 6), learner(tiny)
    before = digest(one.weights())
    nothing = given(rows._replace(mask=np.zeros_like(rows.mask)))
    trained = step(**nothing, learner=one, loss=policy_gradient())
    assert (trained.metrics["skipped"], trained.metrics["tokens"]) == (1, 0)
    assert "is trained on: no step taken" in caplog.text
    assert digest(trained.weights) == before

    told: list[Any] = []

    async def served() -> tuple[int, np.ndarray[Any, Any]]:
        options = TransformersOptions(model=str(tiny), slots=1, dtype="float32")
        engine = await start_engine(
            options, str(tiny), context=32, threads=1, logs=str(tmp_path), journal=told.append, patience=30
        )
        try:
            published = await publish(trained.weights, np.int64(4), engine=engine)
            return int(published.version), await engine.logprobs(rows.tokens[:11])
        finally:
            await engine.close()

    version, logprobs = asyncio.run(served())
    assert version == 5, "batches 0 to 4 are accounted for"
    first = Rows(rows.tokens[:11], np.array([0, 11]), np.arange(11) > 0, {})
    np.testing.assert_allclose(logprobs[1:], one.logprobs(first)[1:], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"minibatches": 0}, "minibatches must be at least 1, not 0"),
        ({"length": 8}, "length says nothing with aggregate token-mean; leave it out"),
        ({"aggregate": "seq-mean-token-sum-norm"}, "divides by a fixed length; give length a number above 0"),
        ({"aggregate": "mean"}, "aggregate must be one of token-mean, "),
    ],
)
def test_contradicting_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate(loss=policy_gradient(), **options)
