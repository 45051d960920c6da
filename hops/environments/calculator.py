"""A calculator that the model may call: `calc(12*7)` is computed, and the model goes on with the result.

The answer to a call is a message of the role `tool`: the number, or "error: …" and what to do. What the model says
without a call is its answer, and ends the episode.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from hops.environments.protocol import Environment, Generate
from hops.rows import reasoning_gym
from hops.rows.example import Example

_CALL = re.compile(r"calc\((.*?)\)\s*$", re.DOTALL)
_LONGEST = 100  # characters of an expression
_LARGEST = 10**12  # of any number
_OPERATIONS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", lambda a, b: a + b),
    ast.Sub: ("-", lambda a, b: a - b),
    ast.Mult: ("*", lambda a, b: a * b),
    ast.FloorDiv: ("//", lambda a, b: a // b),
}


def calculator(
    *, calls: int = 4, keep: int = 1, operations: int = 1, max_tokens: int | None = 16, credit: float = 0.1
) -> Environment:
    """Answer a question with a calculator at hand. The reward is 1 for the right number, else `credit` when at least
    one call was computed, else 0.

    calls: most calls of an episode; after them the model is asked once more, and what it says is its answer
    keep: calls that stay in the history, with their results. A model that works step by step needs the last one only;
    that the older ones go keeps prompts short, and rewrites the history: from there on the episode is a branch of its
    own, and what came before a leaf of the tree.
    operations: most operations of a call: with one, a sum of three numbers takes two calls
    max_tokens: of each turn
    Metrics: `calls`, `errors` (of them), `right`.
    """
    for name, value in (("calls", calls), ("keep", keep), ("operations", operations)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")

    async def play(example: Example, generate: Generate) -> dict[str, float]:
        asked = example.prompt
        if isinstance(asked, str):
            raise ValueError("the calculator needs messages; give the rows format: chat")
        history: list[dict[str, Any]] = []
        made = errors = 0
        while True:
            reply = await generate([*asked, *history], max_tokens=max_tokens)
            call = called(reply.text)
            if call is None or made == calls:
                break
            made += 1
            result = answer(call, operations)
            errors += result.startswith("error")
            history = [*history, reply.message, {"role": "tool", "content": result}][-2 * keep :]
        right = reply.text.strip() == str(example.ground_truth).strip()
        score = 1.0 if right else credit if made > errors else 0.0
        return {"score": score, "right": float(right), "calls": float(made), "errors": float(errors)}

    return play


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


def steps(expression: str) -> list[tuple[str, str]]:
    """The calls of one operation each that compute an expression, and their results: `1+2*3` → 2*3, 1+6.

    Raises ValueError for what the calculator does not compute.
    """
    made: list[tuple[str, str]] = []

    def value(node: ast.expr) -> int:
        if not isinstance(node, ast.BinOp):
            return _value(node, 0)
        left, right = value(node.left), value(node.right)
        if right < 0:
            raise ValueError("a number below 0 stands on the right of an operation")
        call = f"{left}{_operation(node)[0]}{right}"
        result = _value(_parsed(call), 1)
        made.append((call, str(result)))
        return result

    value(_parsed(expression))
    return made


def _parsed(expression: str) -> ast.expr:
    if len(expression) > _LONGEST:
        raise ValueError(f"at most {_LONGEST} characters")
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
            raise ValueError("only numbers and + - * //")
    if abs(value) > _LARGEST:
        raise ValueError("too large a number")
    return value


def _operation(node: ast.BinOp) -> tuple[str, Callable[[int, int], int]]:
    if type(node.op) not in _OPERATIONS:
        raise ValueError("only numbers and + - * //")
    return _OPERATIONS[type(node.op)]


# --- rows -----------------------------------------------------------------------------------------------------------


def calculator_rows(
    *,
    task: str,
    options: dict[str, Any] | None = None,
    shots: int = 2,
    split: str = "train",
    held_out: float = 0.2,
    system: str | None = None,
    seed: int = 0,
) -> Callable[[int], Example]:
    """Rows of a reasoning-gym task as expressions, after `shots` solved ones that show how the calculator is called.

    The options are those of `hops.rows.reasoning_gym`. Raises ValueError for a task that has no expression, and with
    the first row for one that is not arithmetic of whole numbers.
    """
    source = reasoning_gym(
        task=task, options=options, shots=shots, format="compact", split=split,  # type: ignore[arg-type]
        held_out=held_out, seed=seed,
    )  # fmt: skip
    first = [] if system is None else [{"role": "system", "content": system}]

    def row(index: int) -> Example:
        example = source(index)
        asked = [
            *first,
            *_shown(str(example.prompt)),
            {"role": "user", "content": example.columns["metadata"]["expression"]},
        ]
        return example._replace(prompt=asked)

    return row


def _shown(shots: str) -> Iterator[dict[str, str]]:
    """Solved questions, `4 - 1 = 3` a line and then the one that is asked, as chats with the calculator."""
    for line in shots.splitlines()[:-1]:
        question, _, result = line.rpartition("=")
        yield {"role": "user", "content": question.strip()}
        for call, value in steps(question):
            yield {"role": "assistant", "content": f"calc({call})"}
            yield {"role": "tool", "content": value}
        yield {"role": "assistant", "content": result.strip()}
