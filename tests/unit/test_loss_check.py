"""What a graph says of a loss is checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgraph.passes.pipeline import load


def found(*overrides: str, graph: str = "quickstart") -> list[tuple[str, str, str]]:
    """Code, message and help of each finding of a shipped graph with another train hop or owner."""
    path = Path(__file__).parents[2] / f"graphs/{graph}.yaml"
    return [(d.code, d.message, d.help) for d in load(str(path), overrides).diagnostics]


def test_a_loss_says_which_optional_inputs_it_can_not_do_without() -> None:
    ((code, message, help),) = found(
        "hops.train.with.loss={use: hops.loss.policy_gradient, kl: k3, kl_coef: 0.1}"
    )
    assert code == "FG110"
    assert message == "hop train lacks its input reference, which its loss reads"
    assert help == "add reference: <hop> under in:"
    assert found("hops.train.with.loss={use: hops.loss.policy_gradient}") == []


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("hops.train.with.loss={use: hops.loss.gspo}", "its loss"),
        ("hops.train.with.aggregate=seq-mean-token-mean", "aggregate: seq-mean-token-mean"),
    ],
)
def test_what_is_said_of_sequences_needs_to_know_them(override: str, what: str) -> None:
    """Else each leaf of a trajectory that forked would be taken for one."""
    ((code, message, help),) = found(override)
    assert code == "FG110"
    assert message == f"hop train lacks its input trajectory, which {what} reads"
    assert help == "add trajectory: batch under in:"
    assert found(override, "hops.train.in.trajectory=batch") == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "hops.train.with.loss={use: hops.loss.policy_gradient, old: rollout, weight: token}",
            "hops.train.with.loss: weight corrects from the rollout to old: train",
        ),
        (
            "hops.train.with.loss={use: hops.loss.gspo, clip_dual: 0.5}",
            "hops.train.with.loss: clip_dual must be above 1",
        ),
        ("hops.train.with.length=8", "hop train: length says nothing with aggregate token-mean"),
        ("hops.train.with.aggregate=mean", "hops.train.with.aggregate: invalid enum value 'mean'"),
        ("hops.train.with.minibatches=0", "hop train: minibatches must be at least 1, not 0"),
    ],
)
def test_contradicting_options_are_findings(override: str, said: str) -> None:
    ((code, message, _),) = found(override)
    assert (code, message[: len(said)]) == ("FG111", said)


def test_both_sides_are_at_one_temperature_and_none_is_zero() -> None:
    warm = "hops.rollout.with.temperature=0.7"
    ((code, message, help),) = found(warm)
    assert code == "FG304"
    assert message == "hop rollout samples at temperature 0.7, and owner trainer trains at 1"
    assert help == "set temperature: 0.7 under owners.trainer.learner too"
    assert found(warm, "owners.trainer.learner.temperature=0.7") == []
    ((code, message, _),) = found("owners.trainer.learner.temperature=0")
    assert (code, message) == ("FG106", "owners.trainer.learner: temperature must be above 0, not 0")


def test_a_reference_scores_at_the_temperature_of_the_trainer() -> None:
    warm = ("hops.rollout.with.temperature=0.7", "owners.trainer.learner.temperature=0.7")
    ((code, message, help),) = found(*warm, graph="reference")
    assert code == "FG304"
    assert message == "owner reference scores at temperature 1, and owner trainer trains at 0.7"
    assert help == "set temperature: 0.7 under owners.reference.learner too"
    assert found(*warm, "owners.reference.learner.temperature=0.7", graph="reference") == []
