"""One turn: the model answers the prompt, and a reward function scores the answer."""

from __future__ import annotations

from hops.environments.protocol import Environment, Generate
from hops.reward import reasoning_gym as score_of
from hops.rows.example import Example


def reasoning_gym(*, max_tokens: int | None = None) -> Environment:
    """A question of reasoning-gym, answered in one turn and scored by the task's own scorer.

    The rows are those of `hops.dataset.reasoning_gym`. max_tokens: of the answer
    """

    async def play(example: Example, generate: Generate) -> float:
        reply = await generate(example.prompt, max_tokens=max_tokens)
        return score_of(reply.text, example.ground_truth, **example.columns)

    return play
