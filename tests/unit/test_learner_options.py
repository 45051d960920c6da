"""A learner's options: what contradicts is refused, and says which of them and what to do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowgraph.learners.registry import TorchOptions


def options(**given: Any) -> TorchOptions:
    return msgspec.convert({"use": "torch", "model": "m", **given}, TorchOptions)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "a learner that trains needs lr; give lr, or frozen: true"),
        ({"lr": 0}, "lr must be above 0, not 0"),
        ({"lr": 1e-5, "frozen": True}, "lr says nothing beside frozen: true; leave one of them out"),
        ({"frozen": True, "lora": {"rank": 8, "alpha": 16}}, "lora says nothing beside frozen: true"),
        ({"frozen": True, "checkpoint": True}, "checkpoint says nothing beside frozen: true"),
        ({"frozen": True, "warmup": 3}, "warmup says nothing beside frozen: true"),
        ({"lr": 1.0, "optimizer": "sgd", "betas": [0.9, 0.99]}, "betas says nothing beside optimizer: sgd"),
        ({"lr": 1.0, "total_steps": 9}, "total_steps says nothing beside schedule: constant"),
        (
            {"lr": 1.0, "schedule": "cosine"},
            "schedule cosine falls until step total_steps, which must be above warmup, 0",
        ),
        (
            {"lr": 1.0, "schedule": "linear", "warmup": 10, "total_steps": 10},
            "schedule linear falls until step total_steps, which must be above warmup, 10",
        ),
        ({"lr": 1.0, "betas": [0.9, 1.0]}, r"betas must be at least 0 and below 1, not \[0.9, 1.0\]"),
        ({"lr": 1.0, "weight_decay": -0.1}, "weight_decay must be at least 0, not -0.1"),
        ({"lr": 1.0, "lora": {"rank": 0, "alpha": 1}}, "rank of lora must be above 0, not 0"),
        ({"lr": 1.0, "lora": {"rank": 1, "alpha": 1, "targets": []}}, "targets of lora are none: name some"),
        ({"lr": 1.0, "optimizer": "lion"}, "Invalid enum value 'lion'"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        options(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"frozen": True, "dtype": "float32", "temperature": 0.7},
        {"lr": 1e-5, "warmup": 2, "schedule": "cosine", "total_steps": 10},
        {"lr": 1e-5, "optimizer": "sgd", "weight_decay": 0.1},
        {"lr": 1e-4, "lora": {"rank": 8, "alpha": 16, "targets": ["q_proj"]}, "checkpoint": True},
    ],
)
def test_what_fits_together_is_taken_and_survives_a_plan(given: dict[str, Any]) -> None:
    made = options(**given)
    assert msgspec.json.decode(msgspec.json.encode(made), type=TorchOptions) == made
