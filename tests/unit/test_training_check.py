"""What training is told in several places is compared before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from jaxtyping import Int32, Int64
from test_loss_check import found

from flowgraph import Array, Critic, Losses, Scalars, TokenLoss, Tokens, TrainRows, effect, token_loss


def of_values() -> TokenLoss:
    @token_loss(values=True)
    def loss(tokens: Tokens) -> Losses:
        return Losses(tokens.values)

    return loss


@effect(uses=Critic, owner="critic", lifetime="step", trains=True)
def fit(
    tokens: Int32[Array, "token"],
    leaf_offsets: Int64[Array, "leaf+1"],
    *,
    critic: Critic,
    loss: Callable[..., Any],
) -> Annotated[dict[str, float], Scalars()]:
    return critic.step(TrainRows(tokens, leaf_offsets, tokens > 0, {}), loss)


def fit_by(loss: Any) -> str:
    return f"hops.train.with.loss={{use: {loss}}}"


K = "hops.advantage={use: hops.advantage.%s, with: {k: %d}, in: {score: reward, scored: reward, uid: batch, %s}}"
COLUMNS = "trajectory: batch, response_mask: batch, leaf_offsets: batch"
RISING = "owners.trainer.learner.schedule=linear"


@pytest.mark.parametrize(
    ("overrides", "code", "says", "help"),
    [
        (
            ["hops.train.with.minibatches=65"],
            "FG111",
            "hop train cuts a step of 64 trajectories into 65 minibatches",
            "set minibatches to at most 64, or raise dims.group or dims.sample",
        ),
        (
            [K % ("pass_at_k", 9, COLUMNS)],
            "FG111",
            "hop advantage: the best of k = 9 can't be told from 8 samples; lower k or raise dims.sample",
            "change k under with:",
        ),
        (
            [K % ("pkpo", 9, COLUMNS)],
            "FG111",
            "hop advantage: the best of k = 9 can't be told from 8 samples; lower k or raise dims.sample",
            "change k under with:",
        ),
        (
            [fit_by(f"{__name__}.of_values")],
            "FG111",
            "hops.train.with.loss: the loss reads values, and only a critic has them",
            "give one that reads log-probabilities, such as hops.loss.policy_gradient",
        ),
        (
            ["owners.trainer.learner={use: torch, model: smollm2-135m, frozen: true}"],
            "FG301",
            "hop train takes steps, and the learner of owner 'trainer' is frozen",
            "give owners.trainer.learner lr: in place of frozen: true, or set owner: to one that trains",
        ),
        (
            [
                RISING,
                "owners.trainer.learner.total_steps=59",
                "run.steps=30",
                "hops.train.with.minibatches=2",
            ],
            "FG106",
            "owners.trainer.learner: the rate is 0 behind step 59, and train takes 60 "
            "(30 run.steps × 2 minibatches)",
            "set total_steps: 60",
        ),
        (
            ["hops.train.with.loss={use: hops.loss.gspo, ratio: token}"],
            "FG111",
            "hops.train.with.loss: the ratio of gspo is that of the sequence: leave ratio out, "
            "or use policy_gradient",
            "change ratio under loss; the docstring of hops.loss.gspo says what it takes",
        ),
        (
            ["hops.train.with.loss.clip_lo=0.1"],
            "FG111",
            "hops.train.with.loss: hops.loss.policy_gradient has no option 'clip_lo'; "
            "did you mean clip_low? it has "
            "surrogate, ratio, old, clip_low, clip_high, clip_dual, weight, weight_outside, weight_min, weight_max, "
            "kl, kl_coef, entropy_coef",
            "change clip_lo under loss; the docstring of hops.loss.policy_gradient says what it takes",
        ),
        (
            ["owners.trainer.learner.schedule=cosine"],
            "FG106",
            "owners.trainer.learner: schedule cosine falls until step total_steps, which must be above warmup, 0",
            "give total_steps, such as run.steps",
        ),
    ],
)
def test_contradictions_are_found(overrides: list[str], code: str, says: str, help: str) -> None:
    assert found(*overrides) == [(code, says, help)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["hops.train.with.minibatches=64"],
        [K % ("pass_at_k", 8, COLUMNS)],
        [RISING, "owners.trainer.learner.total_steps=60", "run.steps=30", "hops.train.with.minibatches=2"],
    ],
)
def test_what_just_fits_is_taken(overrides: list[str]) -> None:
    assert found(*overrides) == []


def test_a_critic_is_fitted_by_a_loss_of_values() -> None:
    use = f"hops.fit={{use: {__name__}.fit, with: {{loss: {{use: %s}}}}, in: {{tokens: batch, leaf_offsets: batch}}}}"
    assert found(use % f"{__name__}.of_values", graph="ppo") == []
    ((code, message, _),) = found(use % "hops.loss.policy_gradient", graph="ppo")
    assert code == "FG111"
    assert message == "hops.fit.with.loss: the loss reads log-probabilities, and a critic has none"


def test_a_frozen_critic_is_not_fitted() -> None:
    frozen = "owners.critic.learner={use: torch, model: smollm2-135m, head: value, frozen: true}"
    ((code, message, _),) = found(frozen, graph="ppo")
    assert (code, message) == ("FG301", "hop fit takes steps, and the learner of owner 'critic' is frozen")


def test_the_old_log_probabilities_are_not_wired_where_the_loss_compares_with_the_rollout() -> None:
    given = ["hops.train.in.old=reference.rescored"]
    assert found(*given, graph="reference") == []
    rollout = "hops.train.with.loss={use: hops.loss.policy_gradient, old: rollout, kl: k3, kl_coef: 0.1}"
    ((code, message, help),) = found(*given, rollout, graph="reference")
    assert (code, message) == ("FG407", "train is given old, and its loss compares with the rollout")
    assert help == "remove old: from its in:, or set old: train under loss"


@pytest.mark.parametrize(
    ("hop", "wired", "lacks"),
    [
        ("grpo", ["score"], "withheld_uid, which its input withheld_score reads"),
        ("grpo", ["uid"], "withheld_score, which its input withheld_uid reads"),
        ("opo", ["score", "uid"], "withheld_length, which its input withheld_score reads"),
    ],
)
def test_withheld_members_come_with_all_that_their_estimator_reads(
    hop: str, wired: list[str], lacks: str
) -> None:
    """Of rows as `hops.batch.withhold` makes them, which gives no lengths."""
    columns = ", ".join([COLUMNS, *(f"withheld_{name}: batch" for name in wired)])
    overrides = [
        "dims.withheld=63",
        "hops.batch={use: hops.batch.withhold, in: {ready: buffer, score: reward}}",
        "hops.reward.in={tokens: rollout, response_mask: rollout, leaf_offsets: rollout, "
        "ground_truth: rollout, uid: rollout}",
        f"hops.advantage={{use: hops.advantage.{hop}, in: {{score: batch, scored: batch, uid: batch, {columns}}}}}",
    ]
    assert f"hop advantage lacks its input {lacks}" in [message for _, message, _ in found(*overrides)]
