"""hops.loss against the formula, by hand."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import torch

from flowgraph import Tokens
from hops.loss import cispo, gspo, policy_gradient


def run(logprobs: list[float], advantages: list[float], rollout: list[float] | None = None, **config):
    leaf = torch.tensor(logprobs, requires_grad=True)
    fields = {"advantages": torch.tensor(advantages)}
    if rollout is not None:
        fields["logprobs"] = torch.tensor(rollout)
    n = len(logprobs)
    said = policy_gradient(**config)(
        Tokens(leaf, torch.zeros(n), fields, torch.zeros(n, dtype=torch.int64), 1)
    )
    loss, metrics = said.loss, {**said.metrics, **said.spread}
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
    with pytest.raises(ValueError, match="reads 'logprobs', which it was not given; wire the input logprobs"):
        run([-1.0], [1.0], old="rollout")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"clip_low": -0.1}, "clip_low must be in"),
        ({"clip_low": 1.1}, "clip_low must be in"),
        ({"clip_high": -1}, "clip_high not negative"),
        ({"old": "x"}, "old must be train or rollout, not 'x'"),
        ({"surrogate": "ppo"}, "surrogate must be clip or cispo, not 'ppo'"),
        ({"ratio": "word"}, "ratio must be token or sequence"),
        ({"clip_dual": 1.0}, "clip_dual must be above 1, not 1.0"),
        ({"surrogate": "cispo", "clip_dual": 3.0}, "clip_dual must be left out with surrogate cispo"),
        ({"weight_max": 3.0}, "weight_max says nothing without weight; add weight: token"),
        ({"weight_outside": "drop"}, "weight_outside says nothing without weight"),
        ({"weight": "token", "old": "rollout"}, "with old: rollout the ratio does so already"),
        ({"weight": "token", "weight_min": 3.0}, "weight_max above it, not 3.0 and 2.0"),
        ({"weight": "token", "weight_outside": "clip"}, "weight_outside must be cap or drop"),
        ({"kl": "k3"}, "kl needs the other half too; add kl_coef: 0.001"),
        ({"kl_coef": 0.1}, "kl_coef needs the other half too; add kl: k3"),
        ({"kl": "k4", "kl_coef": 0.1}, "kl must be k1 or k2 or k3 or"),
        ({"kl": "k2", "kl_coef": -0.1}, "kl_coef must be finite and not negative, not -0.1"),
        ({"entropy_coef": float("nan")}, "entropy_coef must be finite"),
    ],
)
def test_a_bad_configuration_is_refused(config: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        policy_gradient(**config)


def test_a_known_name_is_a_policy_gradient_with_its_own_bounds() -> None:
    tokens = Tokens(
        torch.tensor([-1.0, -2.0, -0.5]),
        torch.zeros(3),
        {"advantages": torch.tensor([1.0, -1.0, 1.0]), "old": torch.tensor([-3.0, -1.0, -0.4])},
        torch.tensor([0, 0, 1]),
        2,
    )
    same = policy_gradient(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    assert gspo()(tokens).loss.tolist() == same(tokens).loss.tolist()
    # e² is beyond 5, e⁻¹ is not bounded, and neither is the last.
    expected = [5.0, -2 * math.exp(-1), 0.5 * math.exp(-0.1)]
    assert cispo()(tokens).loss.tolist() == pytest.approx(expected)
    assert cispo()(tokens).metrics["clipped"].tolist() == [1, 0, 0]
    assert (gspo().whole, gspo().masks, cispo().whole) == (True, False, False)
    with pytest.raises(ValueError, match="the ratio of gspo is that of the sequence: leave ratio out"):
        gspo(ratio="token")


def test_a_reference_is_watched_without_being_in_the_loss() -> None:
    fields = {"advantages": torch.zeros(2), "reference": torch.tensor([-1.0, -2.0])}
    tokens = Tokens(torch.tensor([-1.0, -1.0]), torch.zeros(2), fields, torch.zeros(2, dtype=torch.int64), 1)
    said = policy_gradient()(tokens)
    assert said.loss.tolist() == [0, 0]
    assert said.metrics["kl"].tolist() == pytest.approx([0, math.exp(-1)])
    with pytest.raises(ValueError, match="wire the input reference of the train hop"):
        policy_gradient(kl="k3", kl_coef=0.1)(tokens._replace(fields={"advantages": torch.zeros(2)}))


def test_making_a_loss_imports_no_torch() -> None:
    code = "import sys; from hops.loss import policy_gradient; policy_gradient(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
