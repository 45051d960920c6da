"""Environments: who the model talks to in an episode of several turns, and what that was worth.

`hops.rollout.episode` plays one; `protocol` says what an environment is.
"""

from hops.environments.calculator import calculator, calculator_rows
from hops.environments.gym import reasoning_gym
from hops.environments.protocol import Environment, Generate, Outcome, Prompt, Reply, check_environment
from hops.environments.verifiers import verifiers, verifiers_rows

__all__ = [
    "Environment",
    "Generate",
    "Outcome",
    "Prompt",
    "Reply",
    "calculator",
    "calculator_rows",
    "check_environment",
    "reasoning_gym",
    "verifiers",
    "verifiers_rows",
]
