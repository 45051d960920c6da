"""The critic's hops: the loss in plain numpy, what they report, and which learner they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowgraph import Losses, Tokens
from flowgraph.passes.pipeline import load
from hops.value import squared_error

PPO = str(Path(__file__).parents[2] / "graphs" / "ppo.yaml")
QUICKSTART = str(Path(__file__).parents[2] / "graphs" / "quickstart.yaml")


def lost(value: Any, old: Any, returns: Any, clip: float | None) -> tuple[Any, Losses, Any]:
    """The loss of each token, all that it says, and the derivative by each value."""
    leaf = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    fields = {"values": torch.tensor(old), "returns": torch.tensor(returns)}
    none = torch.zeros(len(value))
    said = squared_error(clip=clip)(Tokens(leaf, none, fields, none.long(), 1, leaf))
    (slope,) = torch.autograd.grad(said.loss.sum(), leaf)
    return said.loss.detach().numpy(), said, slope.numpy()


def test_the_value_loss_is_ppo_s() -> None:
    """0.5 · max((v − R)², (clip(v, v_old ± ε) − R)²), as verl's compute_value_loss has it."""
    random = np.random.default_rng(0)
    v, old, returns = random.standard_normal((3, 200))
    plain, near = (v - returns) ** 2, (np.clip(v, old - 0.2, old + 0.2) - returns) ** 2
    clipped = (near > plain) & (abs(v - old) > 0.2)
    assert 20 < clipped.sum() < 180
    loss, said, slope = lost(v, old, returns, 0.2)
    assert loss == pytest.approx(0.5 * np.maximum(plain, near))
    assert said.metrics["clipped"].tolist() == clipped.tolist()
    assert slope == pytest.approx(np.where(clipped, 0, v - returns))  # what is clipped passes no gradient
    loss, said, slope = lost(v, old, returns, None)
    assert loss == pytest.approx(0.5 * plain)
    assert slope == pytest.approx(v - returns)
    assert "clipped" not in said.metrics


def test_who_uses_a_critic_and_who_another_learner_is_checked_before_a_run() -> None:
    assert load(PPO).diagnostics == []
    without = [d.message for d in load(PPO, ["owners.critic.learner.head=tokens"]).diagnostics]
    assert [m.partition(" uses")[0] for m in without] == ["hop values", "hop fit"]
    assert "uses a critic, and the learner of owner 'critic' gives no values" in without[0]
    (wrong,) = load(QUICKSTART, ["owners.trainer.learner.head=value"]).diagnostics
    assert wrong.code == "FG301"
    assert "hop train uses a learner, and that of owner 'trainer' is a critic" in wrong.message


@pytest.mark.parametrize(
    ("option", "told"), [("clip: 0", "clip must be above 0"), ("epochs: 0", "epochs must be at")]
)
def test_options_that_say_nothing_are_refused(option: str, told: str) -> None:
    (found,) = load(PPO, [f"hops.fit.with={{{option}}}"]).diagnostics
    assert told in found.message
