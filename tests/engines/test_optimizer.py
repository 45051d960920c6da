"""The optimiser's arithmetic against torch's own, and its schedules against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from flowgraph.learners.optim import MasterAdamW, MasterOptimizer, MasterSGD, Schedule, scale


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=random).to(dtype)) for shape in ((40, 30), (7,))]


def adamw(of: list[torch.nn.Parameter], lr: float = 0.1) -> MasterOptimizer:
    return MasterAdamW(of, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=1.0, warmup=0)


def sgd(of: list[torch.nn.Parameter], lr: float = 0.1) -> MasterOptimizer:
    return MasterSGD(of, lr=lr, weight_decay=0.1, clip=1.0, warmup=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_sums_over_a_divisor_step_as_means_do(make: type, dtype: torch.dtype) -> None:
    sums, means = parameters(dtype), parameters(dtype)
    one, other = make(sums), make(means)
    for step, size in enumerate([5.0, 0.001, 2.0]):  # clipped, not clipped, clipped
        for summed, mean in zip(sums, means, strict=True):
            mean.grad = torch.full_like(mean, size * (step + 1)).cumsum(0)
            summed.grad = mean.grad * 4  # exact in either dtype
        assert one.step(4.0) == pytest.approx(other.step())
    for summed, mean in zip(sums, means, strict=True):
        torch.testing.assert_close(summed, mean, rtol=1e-5, atol=1e-6)


def test_sgd_equals_torchs() -> None:
    ours, theirs = parameters(), parameters()
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    optimizer, reference = sgd(ours), torch.optim.SGD(groups, lr=0.1)
    for size in (5.0, 0.001):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one) * size
            other.grad = one.grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        reference.step()
        optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_bfloat16_parameters_follow_float32_masters(make: type) -> None:
    rounded, exact = parameters(torch.bfloat16), [p.float() for p in parameters(torch.bfloat16)]
    exact = [torch.nn.Parameter(p) for p in exact]
    one, other = make(rounded, 1e-4), make(exact, 1e-4)
    for _ in range(8):  # each step is below half a unit in the last place of most parameters
        for _ in range(2):  # two micro-batches
            for low, high in zip(rounded, exact, strict=True):
                low.grad = torch.ones_like(low)
                high.grad = torch.ones_like(high) if high.grad is None else high.grad + 1
            one.accumulate()
            other.accumulate()
        assert one.step() == other.step()
    for low, high in zip(rounded, exact, strict=True):
        assert torch.equal(low, high.bfloat16())


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    ours = parameters()
    before = [p.detach().clone() for p in ours]
    optimizer = adamw(ours)
    ours[1].grad = torch.full_like(ours[1], float("inf"))
    with pytest.raises(FloatingPointError, match="gradient norm is inf"):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, before, strict=True))
    assert ours[1].grad is None


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]),
    ],
)
def test_schedules_of_six_steps_after_a_warm_up_of_two(schedule: Schedule, expected: list[float]) -> None:
    found = [scale(step, schedule, warmup=2, total_steps=6) for step in range(1, 8)]
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_rank_whose_shard_is_empty_steps_along(make: type) -> None:
    """A matrix of fewer rows than there are ranks leaves some without one."""
    weight, empty = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.empty(0, 2))
    optimizer = make([empty, weight])
    weight.grad, empty.grad = torch.ones(3, 2), torch.empty(0, 2)
    norm, _ = optimizer.step()
    assert norm == pytest.approx(math.sqrt(6))
    assert (weight < 1).all()
    alone = make([torch.nn.Parameter(torch.empty(0, 2))])
    assert alone.step() == (0.0, 0.1)
