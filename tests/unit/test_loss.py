"""hops.loss against the formula, by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from flowgraph import Tokens
from hops.loss import policy_gradient


def run(logprobs: list[float], advantages: list[float], rollout: list[float] | None = None, **config):
    leaf = torch.tensor(logprobs, requires_grad=True)
    fields = {"advantages": torch.tensor(advantages)}
    if rollout is not None:
        fields["logprobs"] = torch.tensor(rollout)
    n = len(logprobs)
    said = policy_gradient(**config)(
        Tokens(leaf, torch.zeros(n), fields, torch.zeros(n, dtype=torch.int64), 1)
    )
    loss, metrics = said.loss, said.metrics
    loss.sum().backward()
    return loss.tolist(), leaf.grad.tolist(), {name: value.tolist() for name, value in metrics.items()}


def test_L8_on_policy_the_ratio_is_exactly_one_and_the_gradient_that_of_reinforce() -> None:
    loss, gradient, metrics = run([-0.1, -7.3, -1e-7], [2.0, -3.0, 0.5], rollout=[-0.2, -7.0, 0.0])
    assert metrics["ratio"] == [1.0, 1.0, 1.0]
    assert metrics["clipped"] == [0.0, 0.0, 0.0]
    assert loss == [-2.0, 3.0, -0.5]
    assert gradient == [-2.0, 3.0, -0.5]
    assert metrics["logprob_gap"] == pytest.approx([0.1, 0.3, 0.0], abs=1e-6)


def test_against_the_rollout_the_surrogate_is_clipped_only_where_that_lowers_it() -> None:
    up, down = math.log(1.5), math.log(0.5)
    loss, gradient, metrics = run(
        [up, up, down, down, 0.1], [1.0, -1.0, 1.0, -1.0, 2.0], rollout=[0.0] * 5, old="rollout"
    )
    assert loss == pytest.approx([-1.2, 1.5, -0.5, 0.8, -2 * math.exp(0.1)])
    assert metrics["clipped"] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert gradient == pytest.approx([0.0, 1.5, -0.5, 0.0, -2 * math.exp(0.1)])


def test_the_bounds_are_separate() -> None:
    loss, _, _ = run([1.0, -1.0], [1.0, -1.0], rollout=[0.0, 0.0], old="rollout", clip_low=0.1, clip_high=0.3)
    assert loss == pytest.approx([-1.3, 0.9])


def test_without_rollout_logprobs_there_is_no_gap() -> None:
    assert set(run([-1.0], [1.0])[2]) == {"ratio", "clipped"}
    with pytest.raises(KeyError, match="logprobs"):
        run([-1.0], [1.0], old="rollout")


@pytest.mark.parametrize("config", [{"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -1}, {"old": "x"}])
def test_a_bad_configuration_is_refused(config: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        policy_gradient(**config)


def test_making_a_loss_imports_no_torch() -> None:
    code = "import sys; from hops.loss import policy_gradient; policy_gradient(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
