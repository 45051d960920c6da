"""One episode of an environment: what its turns may sample, the tree that they make, and how it ends.

Life of an episode:

1. The environment gets the row's example, and `Turns.generate` to ask the model with.
2. Each turn's prompt becomes a path of the token tree (`hops.turns`); what may be sampled is what is left of the
   response budget, of the context and of the turns, whichever is least.
3. The turn draws by a key of its own, made of the trajectory's and its number, so that it depends on nothing else.
4. When the environment returns, the tree is flattened. When it raises, or its time is over, the trajectory is rejected.
   Either way no request of it stays in the engine.
"""

from __future__ import annotations

import asyncio
import math
import sys
import traceback
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowgraph import Engine, Rejected, Sampling, Tokenizer
from hops import turns
from hops.environments.protocol import Environment, Outcome, Prompt, Reply
from hops.keys import key_of
from hops.rows.example import Example
from hops.scoring import as_float32
from hops.signature import name_of

GRACE = 1.0  # seconds for an environment to end once it is told to


class Turns:
    """The model, as one episode may use it.

    budget: most tokens sampled over all turns; context: of a leaf; leaves: of the tree
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        tree: turns.Tree,
        *,
        key: int,
        budget: int,
        context: int,
        max_turns: int,
        leaves: int,
        temperature: float,
        stop: tuple[str, ...],
    ) -> None:
        self.tree = tree
        self._engine, self._tokenizer = engine, tokenizer
        self._key, self._budget, self._context, self._leaves = key, budget, context, leaves
        self._max_turns, self._temperature, self._stop = max_turns, temperature, stop
        self._under_way: dict[str, int] = {}  # rid → tokens that it may sample
        self.turns = self.refused = self.retractions = self.pressed = 0
        self.truncated = self.over = False
        self.fault: Exception | None = None

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Reply:
        """See `hops.environments.Generate`."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        if self.over:
            raise RuntimeError("the episode is over: ask the model before the environment returns")
        text = prompt if isinstance(prompt, str) else self._tokenizer.chat(prompt, tools=tools)
        path = turns.prompt_of(self.tree, text, self._tokenizer)
        if not path:
            raise ValueError("the prompt has no tokens; give it text")
        room, why = self._room(path)
        if room < 1:
            return self._refuse(why)
        if max_tokens is not None and max_tokens < room:
            room, why = max_tokens, "length"
        sampling = Sampling(room, self._temperature, self._stop if stop is None else texts(stop))
        turn, rid = self.turns, uuid.uuid4().hex
        self.turns += 1
        self._under_way[rid] = room
        try:
            ids = np.concatenate([piece.ids for piece in path])
            out = await self._engine.generate(ids, sampling, key=turn_key(self._key, turn), rid=rid)
            if out.finish_reason == "abort":
                raise Rejected("aborted")
            self.tree = turns.grow(
                self.tree, path, turn, out.ids, out.logprobs, out.versions, self._tokenizer
            )
            self._check_leaves()
        except Exception as error:  # whatever the environment makes of it
            self.fault = self.fault or error
            raise
        finally:
            del self._under_way[rid]
        self.retractions += out.retractions
        self.pressed += out.pressed
        ended = why if out.finish_reason == "length" else out.finish_reason
        self.truncated |= ended != "stop"
        return Reply(self._tokenizer.decode(out.ids), ended)

    def end(self) -> None:
        """Nothing more is sampled."""
        self.over = True
        for rid in self._under_way:
            self._engine.abort(rid)

    def _room(self, path: turns.Path) -> tuple[int, str]:
        """How many tokens a turn may sample, and what bounds them."""
        left = self._budget - self.tree.sampled - sum(self._under_way.values())
        bounds = [(left, "length"), (self._context - turns.length(path), "context")]
        return min(bounds) if self.turns < self._max_turns else (0, "turns")

    def _refuse(self, why: str) -> Reply:
        self.truncated = True
        self.refused += 1
        if self.refused > self._max_turns:
            raise RuntimeError(
                f"the environment asks on and on; end the episode when a reply has ended {why!r}"
            )
        return Reply("", why)

    def _check_leaves(self) -> None:
        made = len(turns.leaves(self.tree))
        if made > self._leaves:
            raise ValueError(
                f"the episode forked into {made} leaves, and dims.leaf.max is {self._leaves}; raise it, "
                "lower max_turns, or let prompts go on from the replies before them"
            )


async def play(environment: Environment, example: Example, model: Turns, time_limit: float) -> Outcome:
    """What the environment returns. Raises Rejected when its time is over or it raises, and what the engine raised.

    An environment that does not end when it is cancelled is left to itself; its requests are aborted all the same.
    """
    task = asyncio.ensure_future(_episode(environment, example, model))
    try:
        done, _ = await asyncio.wait([task], timeout=time_limit)
    finally:
        model.end()
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # it has been heard
    if not done:
        await asyncio.wait([task], timeout=GRACE)
        raise Rejected("time limit")
    if model.fault is not None:
        raise model.fault
    try:
        return task.result()
    except Rejected:
        raise
    except (Exception, asyncio.CancelledError) as error:
        print(f"environment {name_of(environment)} raised:", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
        raise Rejected("environment error") from error


async def _episode(environment: Environment, example: Example, model: Turns) -> Outcome:
    """An environment that exits ends its episode, and not the process whose event loop it shares."""
    try:
        return await environment(example, model.generate)
    except SystemExit as error:
        raise RuntimeError(f"it exits, with {error.code}") from error


def texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings, of which there may be one alone."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def turn_key(key: int, turn: int) -> int:
    """64 bits that depend on the trajectory's key and the number of the turn, and on nothing else."""
    return key_of(f"{key}/{turn}")


def judged(environment: Environment, outcome: Outcome) -> tuple[float | None, dict[str, float]]:
    """The reward and the environment's own numbers. Raises ValueError for a reward that is no finite float32."""
    numbers = dict(outcome) if isinstance(outcome, Mapping) else {"score": outcome}
    if "score" not in numbers:
        raise ValueError(
            f"environment {name_of(environment)} returned {', '.join(numbers)}, and no 'score'; "
            "add it, as None when there is none"
        )
    made = {
        name: None if value is None else _number(environment, name, value) for name, value in numbers.items()
    }
    score = made.pop("score")
    return score, {name: value for name, value in made.items() if value is not None}


def _number(environment: Environment, name: str, value: Any) -> float:
    number = as_float32(value)
    if not math.isfinite(number):
        raise ValueError(
            f"environment {name_of(environment)} returned {value!r:.80} as {name}; give a finite number, or None"
        )
    return number
