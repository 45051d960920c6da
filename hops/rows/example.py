"""One row of data, and the JSON in which its ground truth crosses to the reward."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Int32

from flowgraph import Array, Tokenizer

Messages = list[dict[str, Any]]


class Example(NamedTuple):
    """A prompt and what a reward function may want to know of it.

    prompt: text, or chat messages ({"role", "content"})
    ground_truth: any JSON value
    name: the column that the ground truth came from, so that a reward function may ask for it by that name
    columns: every other column, by name
    """

    prompt: str | Messages
    ground_truth: Any
    name: str = "ground_truth"
    columns: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default, never written)


class RowSource(Protocol):
    """Index → example, a pure function of the options that the source was made with."""

    def __call__(self, index: int) -> Example:
        """Row `index`, from 0. Raises IndexError past the last one; an endless source never does."""
        ...

    def where(self, index: int) -> str:
        """How an error names the row: file and line, or task and index."""
        ...


def pack(example: Example) -> dict[str, Any]:
    """The JSON of the `ground_truth` column: {"ground_truth", "name", "columns"[, "messages"]}.

    The messages of a chat prompt travel along, because token ids do not say where one message ends.
    """
    packed = {"ground_truth": example.ground_truth, "name": example.name, "columns": example.columns}
    return packed if isinstance(example.prompt, str) else {**packed, "messages": example.prompt}


def unpack(value: Any) -> Example:
    """What `pack` packed. Any other JSON is a ground truth without columns (a dataset hop of the user's own).

    The prompt is the messages of a chat, else "": the text is in the tokens.
    """
    keys = {"ground_truth", "name", "columns", "messages"}
    if not isinstance(value, dict) or "ground_truth" not in value or not keys >= value.keys():
        return Example("", value)
    name, columns = value.get("name", "ground_truth"), value.get("columns") or {}
    return Example(value.get("messages", ""), value["ground_truth"], name, columns)


def prompt_ids(example: Example, tokenizer: Tokenizer, where: str) -> Int32[Array, "prompt"]:
    """Token ids of the prompt; messages by the model's chat template, ending where the assistant answers.

    Raises ValueError naming `where` for a prompt of no tokens, ModelError for a model without chat template.
    """
    text = example.prompt if isinstance(example.prompt, str) else tokenizer.chat(example.prompt)
    ids = tokenizer.encode(text)
    if not len(ids):
        raise ValueError(f"{where}: the prompt has no tokens; remove the row or give it text")
    return ids


def near(name: str, known: Iterable[str]) -> str:
    """ "did you mean …? " when a known name is close, else ""."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""
