"""Environments of the `verifiers` package (https://github.com/PrimeIntellect-ai/verifiers), as they are.

What they ask a client for, the model answers token by token as in any other episode. Needs `pip install
'flowgraph-rl[verifiers]'`: the releases that have `Environment`, `SingleTurnEnv`, `MultiTurnEnv` and `ToolEnv`.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from hops.environments.protocol import Environment, Generate, Outcome
from hops.rows.example import Example

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def verifiers(
    *, load: str, arguments: dict[str, Any] | None = None, max_tokens: int | None = None
) -> Environment:
    """Episodes of a verifiers environment; the reward is its rubric's, and so are the metrics.

    load: an environment's name, for `verifiers.load_environment`, or the import path of a function that makes one
    arguments: of that function
    max_tokens: of each turn, unless the environment's own sampling arguments say less
    Tool calls are those of Hermes and Qwen, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; tools are
    described to the model by its chat template, or by the environment's system prompt where the template knows of none.
    Raises ValueError where verifiers is not installed, or has no environments of this kind.
    """
    package()

    async def play(example: Example, generate: Generate) -> Outcome:
        row = {
            "prompt": _messages(example),
            "answer": example.ground_truth,
            "example_id": 0,
            **example.columns,
        }
        made = await _environment(load, _key(arguments)).run_rollout(
            row, _client(generate, max_tokens), "flowgraph", {}
        )
        if made.get("error"):
            raise RuntimeError(f"the environment {load} failed: {made['error']}")
        return {**dict(made.get("metrics") or {}), "score": made["reward"]}

    return play


def verifiers_rows(*, load: str, arguments: dict[str, Any] | None = None) -> Callable[[int], Example]:
    """The rows of a verifiers environment's own data set, for `hops.dataset.render`; it begins again after the last."""
    package()

    def row(index: int) -> Example:
        rows = _environment(load, _key(arguments)).get_dataset()
        given = dict(rows[index % len(rows)])
        columns = {
            name: value
            for name, value in given.items()
            if name not in ("prompt", "answer") and value is not None
        }
        prompt = given["prompt"]
        asked = prompt if isinstance(prompt, str) else [_message(message) for message in prompt]
        return Example(asked, given.get("answer"), "answer", columns)

    return row


def package() -> Any:
    """The package `verifiers`. Raises ValueError where it is missing or of another kind."""
    fix = "pip install 'flowgraph-rl[verifiers]'"
    try:
        module = importlib.import_module("verifiers")
        module.SingleTurnEnv  # noqa: B018 (it is loaded when it is first asked for)
    except ImportError:
        raise ValueError(f"verifiers is not installed; {fix}") from None
    except AttributeError:
        raise ValueError(f"verifiers {module.__version__} has no SingleTurnEnv any more; {fix}") from None
    return module


@functools.lru_cache(maxsize=16)
def _environment(load: str, arguments: str) -> Any:
    path, _, name = load.rpartition(".")
    given = json.loads(arguments)
    if not path:
        return package().load_environment(load, **given)
    return getattr(importlib.import_module(path), name)(**given)


def _key(arguments: Mapping[str, Any] | None) -> str:
    return json.dumps(arguments or {}, sort_keys=True)


def _messages(example: Example) -> list[dict[str, Any]]:
    if isinstance(example.prompt, str):
        return [{"role": "user", "content": example.prompt}]
    return example.prompt


def _message(message: Any) -> dict[str, Any]:
    """A message as a chat template takes it. Tool calls stand in the content, as the model wrote them."""
    given = message if isinstance(message, Mapping) else message.model_dump()
    content = given.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return {"role": given["role"], "content": content}


def _client(generate: Generate, max_tokens: int | None) -> Any:
    """A client of verifiers that asks `generate`."""
    types = importlib.import_module("verifiers.types")

    class Client(importlib.import_module("verifiers.clients").Client):  # type: ignore[misc]
        def setup_client(self, config: Any) -> Any:
            return config

        async def close(self) -> None:
            pass

        async def raise_from_native_response(self, response: Any) -> None:
            pass

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return [_message(message) for message in messages], {}

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            known = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": known}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            asked = sampling_args.get("max_completion_tokens") or sampling_args.get("max_tokens")
            most = min((n for n in (asked, max_tokens) if n is not None), default=None)
            return await generate(prompt, max_tokens=most, stop=sampling_args.get("stop"), tools=tools)

        async def from_native_response(self, reply: Any) -> Any:
            calls = [types.ToolCall(**call) for call in tool_calls(reply.text)]
            why = "length" if reply.ended != "stop" else "tool_calls" if calls else "stop"
            message = types.ResponseMessage(
                content=reply.text,
                tool_calls=calls or None,
                finish_reason=why,
                is_truncated=reply.ended != "stop",
            )
            return types.Response(
                id=uuid.uuid4().hex, created=int(time.time()), model="flowgraph", message=message
            )

    return Client(generate)


def tool_calls(text: str) -> list[dict[str, str]]:
    """The tool calls in a message: id, name, and arguments as JSON. What is no JSON is none."""
    calls: list[dict[str, str]] = []
    for found in _TOOL_CALL.findall(text):
        try:
            call = json.loads(found)
        except ValueError:
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = json.dumps(call.get("arguments") or {})
            calls.append({"id": f"call_{len(calls)}", "name": call["name"], "arguments": arguments})
    return calls
