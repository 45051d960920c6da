"""A calculator that the model may call: `calc(12*7)` is computed, and the model goes on with the result.

The answer to a call is the value, or "error: …" and why. What the model says without a call is its answer, and ends
the episode. Calls stay in the history in one of two ways:

- `dialogue`: as messages, the call and then a `tool` message with its result. Each turn goes on from the one before:
  the episode is one leaf.
- `notes`: as lines under the question, `31+17 = 48`, and no message besides. The history is rewritten each time, as by
  agents that keep notes in place of a transcript: prompts stay short, and the model sees each step as a question of one
  step. Each turn after a call is a branch of its own that shares the prompt's beginning, and a leaf.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from hops.environments.protocol import Environment, Generate
from hops.rows import reasoning_gym
from hops.rows.example import Example, Messages
from hops.rows.gym import Split

History = Literal["dialogue", "notes"]


class Call(NamedTuple):
    """said: the message that made the call; result: what the calculator says of the expression"""

    said: str
    expression: str
    result: str


_CALL = re.compile(r"calc\((.*?)\)\s*$", re.DOTALL)
_LONGEST = 100  # characters of an expression
_LARGEST = 10**12  # of any number
_ONLY = "only numbers and + - * //"
_OPERATIONS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", lambda a, b: a + b),
    ast.Sub: ("-", lambda a, b: a - b),
    ast.Mult: ("*", lambda a, b: a * b),
    ast.FloorDiv: ("//", lambda a, b: a // b),
}


def calculator(
    *,
    calls: int = 4,
    history: History = "dialogue",
    operations: int = 1,
    max_tokens: int | None = 16,
    credit: float = 0.1,
) -> Environment:
    """Answer a question with a calculator at hand. The reward is 1 for the right number, else `credit` when at least
    one call was computed, else 0.

    calls: most calls of an episode; after them the model is asked once more, and what it says is its answer
    history: how calls stay in the history, dialogue or notes; rows show it in the same way
    operations: most operations of a call: with one, a sum of three numbers takes two calls
    max_tokens: of each turn
    Metrics: `calls`, `errors` (of them), `right`.
    """
    if calls < 1 or operations < 1:
        raise ValueError(f"calls and operations must be at least 1, not {calls} and {operations}")
    _check_history(history)

    async def play(example: Example, generate: Generate) -> dict[str, float]:
        asked = example.prompt
        if isinstance(asked, str):
            raise ValueError("the calculator needs messages; give the rows format: chat")
        made: list[Call] = []
        while True:
            reply = await generate(_with_calls(asked, made, history), max_tokens=max_tokens)
            expression = called(reply.text)
            if expression is None or len(made) == calls:
                break
            made.append(Call(reply.text, expression, answer(expression, operations)))
        right = reply.text.strip() == str(example.ground_truth).strip()
        errors = sum(call.result.startswith("error") for call in made)
        score = 1.0 if right else credit if len(made) > errors else 0.0
        return {"score": score, "right": right, "calls": len(made), "errors": errors}

    return play


def _check_history(history: str) -> None:
    if history not in get_args(History):
        raise ValueError(f"history {history!r} is none of {', '.join(get_args(History))}")


def _with_calls(asked: Messages, made: Sequence[Call], history: History) -> Messages:
    """The messages of a question, and the calls that were made of it with their results."""
    if history == "notes":
        *before, question = asked
        notes = [f"{call.expression} = {call.result}" for call in made]
        return [*before, {**question, "content": "\n".join([question["content"], *notes])}]
    return [*asked, *(m for call in made for m in (_assistant(call.said), _tool(call.result)))]


def called(text: str) -> str | None:
    """The expression of a call at the end of a message; None when there is no call."""
    found = _CALL.search(text.strip())
    return found[1] if found else None


def answer(expression: str, operations: int = 1) -> str:
    """What the calculator says: the value, or "error: …". Never raises, whatever the expression."""
    try:
        return str(_value(_parsed(expression), operations))
    except ValueError as error:
        return f"error: {error}"


def steps(expression: str) -> list[Call]:
    """The calls of one operation each that compute an expression: `1+2*3` → calc(2*3), calc(1+6).

    Raises ValueError for what the calculator does not compute.
    """
    made: list[Call] = []

    def value(node: ast.expr) -> int:
        if not isinstance(node, ast.BinOp):
            return _value(node, 0)
        left, right = value(node.left), value(node.right)
        if right < 0:
            raise ValueError("a number below 0 stands on the right of an operation")
        one = f"{left}{_operation(node)[0]}{right}"
        result = _value(_parsed(one), 1)
        made.append(Call(f"calc({one})", one, str(result)))
        return result

    value(_parsed(expression))
    return made


def _parsed(expression: str) -> ast.expr:
    if len(expression) > _LONGEST:
        raise ValueError(f"at most {_LONGEST} characters")
    if not re.fullmatch(r"[0-9\s+*/()-]*", expression):
        raise ValueError(_ONLY)
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("no arithmetic") from None


def _value(node: ast.expr, operations: int) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand, operations)
        case ast.BinOp(left=left, right=right):
            if sum(isinstance(one, ast.BinOp) for one in ast.walk(node)) > operations:
                raise ValueError(f"at most {operations} operation at a time")
            sign, compute = _operation(node)
            a, b = _value(left, operations), _value(right, operations)
            if sign == "//" and b == 0:
                raise ValueError("division by zero")
            value = compute(a, b)
        case _:
            raise ValueError(_ONLY)
    if abs(value) > _LARGEST:
        raise ValueError("too large a number")
    return value


def _operation(node: ast.BinOp) -> tuple[str, Callable[[int, int], int]]:
    if type(node.op) not in _OPERATIONS:
        raise ValueError(_ONLY)
    return _OPERATIONS[type(node.op)]


# --- rows -----------------------------------------------------------------------------------------------------------


def calculator_rows(
    *,
    task: str,
    options: dict[str, Any] | None = None,
    shots: int = 2,
    history: History = "dialogue",
    split: Split = "train",
    held_out: float = 0.2,
    system: str | None = None,
    seed: int = 0,
) -> Callable[[int], Example]:
    """Rows of a reasoning-gym task as expressions, after `shots` solved ones that show how the calculator is called.

    history: as that of the calculator; the other options are those of `hops.rows.reasoning_gym`
    Raises ValueError for a task that has no expression, and with the first row for one that is not arithmetic of whole
    numbers.
    """
    _check_history(history)
    source = reasoning_gym(
        task=task,
        options=options,
        shots=shots,
        format="compact",
        split=split,
        held_out=held_out,
        seed=seed,
    )
    first = [] if system is None else [{"role": "system", "content": system}]

    def row(index: int) -> Example:
        example = source(index)
        question = _user(example.columns["metadata"]["expression"])
        return example._replace(prompt=[*first, *_shown(str(example.prompt), history), question])

    return row


def _shown(shots: str, history: History) -> Iterator[dict[str, str]]:
    """Solved questions, `4 - 1 = 3` a line and then the one that is asked, as chats with the calculator."""
    for line in shots.splitlines()[:-1]:
        question, _, result = line.rpartition("=")
        asked, calls = [_user(question.strip())], steps(question)
        if history == "notes":
            for at, call in enumerate(calls):
                yield from (*_with_calls(asked, calls[:at], history), _assistant(call.said))
        yield from (*_with_calls(asked, calls, history), _assistant(result.strip()))


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}
