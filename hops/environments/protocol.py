"""What an environment is: one function that plays one episode and says what it was worth.

    async def twice(example: Example, generate: Generate) -> float:
        first = await generate(example.prompt)
        again = [*example.prompt, first.message, {"role": "user", "content": "Are you sure?"}]
        return float((await generate(again)).text.strip() == example.ground_truth)

A graph names such a function (`environment: my_module.twice`), or a factory of one with its options
(`environment: {use: hops.environments.calculator, calls: 4}`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hops.rows.example import Example
from hops.signature import name_of

Prompt = str | Sequence[Mapping[str, Any]]
Outcome = float | None | Mapping[str, float | None]


class Reply(NamedTuple):
    """What the model answered in one turn.

    text: without special tokens; it may end with a stop string
    ended: "stop" when the model ended it; else the episode allows no more: "length" (of the turn, or the response
    budget is spent), "context" (the model's context is full), "turns" (max_turns)
    """

    text: str
    ended: str

    @property
    def message(self) -> dict[str, str]:
        """The reply as a message of the next prompt, to the letter: so the next turn goes on from its tokens."""
        return {"role": "assistant", "content": self.text}


class Generate(Protocol):
    """Asks the model. Several calls may be under way at once."""

    async def __call__(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Reply:
        """The answer to messages ({"role", "content"}), or to a text that it continues.

        A prompt that begins with an earlier one and its reply goes on from there; any other begins a branch.

        max_tokens: of this turn; the episode's budget bounds it in any case, and several calls at once should share it
        stop: instead of the graph's stop strings; tools: JSON schemas, for a chat template that knows of them
        """
        ...


class Environment(Protocol):
    async def __call__(self, example: Example, generate: Generate) -> Outcome:
        """Play one episode. example: the row, its prompt as messages or text; see `hops.rows.Example`.

        Returns the reward; None when there is none to give; or {"score": reward, name: number, …}, of which the
        others become metrics. Whatever it raises ends this episode only.
        """
        ...


def check_environment(environment: Any) -> None:
    """Raise ValueError for what can't be called as an environment."""
    called = environment if inspect.isroutine(environment) else type(environment).__call__
    name = name_of(environment)
    if not inspect.iscoroutinefunction(called):
        raise ValueError(
            f"environment {name} is no `async def` of (example, generate); where it makes one, write "
            f"environment: {{use: {name}, …}}"
        )
    try:
        inspect.signature(environment).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"environment {name}{inspect.signature(environment)} can't be called with (example, generate): {error}; "
            "take these two, and options by a factory"
        ) from None
