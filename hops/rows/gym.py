"""Rows of a reasoning-gym task (https://github.com/open-thought/reasoning-gym), as text or as a chat.

Three disjoint sets of questions, whatever the seeds: a hash of the question's text decides whether it is held
out; the few-shot examples are a fixed draw of the others; the train split is the rest.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, Literal

from hops.rows.catalogue import COMPACT, check_task
from hops.rows.example import Example, Messages

Format = Literal["compact", "plain", "chat"]
Split = Literal["train", "held_out"]

# Some tasks prepare all their rows at once, some hold at most 20,000: a stream is blocks of this many rows.
_BLOCK = 1000
# So many draws in a row without a new question mean that there is none.
_MISSES = 2000


def reasoning_gym(
    *,
    task: str,
    options: dict[str, Any] | None = None,
    shots: int = 0,
    format: Format = "plain",
    split: Split = "held_out",
    held_out: float = 0.2,
    system: str | None = None,
    seed: int = 0,
) -> GymRows:
    """A source of reasoning-gym rows. The train split is endless; the held-out rows are distinct, and end.

    options: of the task, e.g. {min_terms: 2}
    shots: solved examples in front of every question, the same ones throughout
    format: "compact" is the bare expression (`4 - 1 =`), "plain" the task's own wording, "chat" messages
    held_out: share of all questions that the train split never shows
    system: a system message (chat only)
    seed: of the train split; held-out rows and few-shot examples do not depend on it
    Raises ValueError for an unknown task, option or format. reasoning-gym is imported with the first row.
    """
    check_task(task, options or {})
    if format == "compact" and task not in COMPACT:
        raise ValueError(
            f"format compact needs a task that is one expression: {', '.join(COMPACT)}; use plain or chat"
        )
    if format not in ("compact", "plain", "chat"):
        raise ValueError(f"format {format!r} is none of compact, plain, chat")
    if split not in ("train", "held_out"):
        raise ValueError(f"split {split!r} is none of train, held_out")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is a share between 0 and 1, not {held_out}")
    if shots < 0:
        raise ValueError(f"shots must not be negative, not {shots}")
    if system is not None and format != "chat":
        raise ValueError(f"a system message needs format: chat, not {format}")
    return GymRows(task, dict(options or {}), shots, format, split, held_out, system, seed)


class GymRows:
    """See `reasoning_gym`. What it remembers are rows that it would draw again just the same."""

    def __init__(
        self,
        task: str,
        options: dict[str, Any],
        shots: int,
        format: Format,
        split: Split,
        held_out: float,
        system: str | None,
        seed: int,
    ) -> None:
        self.task, self.options, self.shots, self.format = task, options, shots, format
        self.split, self.share, self.system, self.seed = split, held_out, system, seed
        self._held: list[dict[str, Any]] = []
        self._drawn = 0

    def __call__(self, index: int) -> Example:
        """Row `index`. Raises IndexError past the last distinct held-out question."""
        entry = self._train(index) if self.split == "train" else self._held_out(index)
        known = {
            k: v
            for k, v in entry["metadata"].items()
            if k not in ("source_dataset", "source_index", "difficulty")
        }
        columns: dict[str, Any] = {"task": self.task, "metadata": _plain(known)}
        if self.options:
            columns["options"] = self.options
        return Example(self._prompt(entry), entry["answer"], "answer", columns)

    def where(self, index: int) -> str:
        return f"reasoning-gym {self.task}, {self.split} row {index}"

    # --- which questions -----------------------------------------------------------------

    def _train(self, index: int) -> dict[str, Any]:
        shown = {e["question"] for e in self._examples}
        for attempt in range(_MISSES):
            entry = self._draw(f"train/{self.seed}/{attempt}", index)
            if not self._is_held_out(entry) and entry["question"] not in shown:
                return entry
        raise ValueError(
            f"task {self.task} has no question left to train on beside its {self.shots} shots and the "
            "held-out ones; widen its options, or lower shots or held_out"
        )

    def _held_out(self, index: int) -> dict[str, Any]:
        seen = {e["question"] for e in self._held}
        misses = 0
        while len(self._held) <= index:
            if misses == _MISSES:
                raise IndexError(
                    f"task {self.task} has only {len(seen)} distinct held-out questions with these options; "
                    "ask for fewer, widen the options or raise held_out"
                )
            entry = self._draw("held_out", self._drawn)
            if self._is_held_out(entry) and entry["question"] not in seen:
                seen.add(entry["question"])
                self._held.append(entry)
                misses = 0
            self._drawn, misses = self._drawn + 1, misses + 1
        return self._held[index]

    @functools.cached_property
    def _examples(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for at in range(_MISSES):
            if len(found) == self.shots:
                return list(found.values())
            entry = self._draw("shots", at)
            if entry["answer"] is None:
                raise ValueError(f"task {self.task} states no answer that could be shown; use shots: 0")
            if not self._is_held_out(entry):
                found.setdefault(entry["question"], entry)
        raise ValueError(
            f"task {self.task} has only {len(found)} questions for {self.shots} shots; lower shots"
        )

    def _is_held_out(self, entry: dict[str, Any]) -> bool:
        return _hash(entry["question"], 64) < self.share * 2**64

    def _draw(self, stream: str, index: int) -> dict[str, Any]:
        """Entry `index` of a stream. Tasks seed row i with seed + i, so blocks have seeds far apart."""
        block, at = divmod(index, _BLOCK)
        options = json.dumps(self.options, sort_keys=True)
        entry: dict[str, Any] = _dataset(self.task, options, _hash(f"{stream}/{block}", 31))[at]
        return entry

    # --- what the model reads -----------------------------------------------------------------

    def _prompt(self, entry: dict[str, Any]) -> str | Messages:
        if self.format == "chat":
            messages: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]
            for shot in self._examples:
                messages.append({"role": "user", "content": shot["question"]})
                messages.append({"role": "assistant", "content": str(shot["answer"])})
            return [*messages, {"role": "user", "content": entry["question"]}]
        return self._shot_text + self._question(entry)

    @functools.cached_property
    def _shot_text(self) -> str:
        """Question, answer, newline, …; a blank line between when questions have several lines themselves."""
        asked = [(self._question(e), str(e["answer"])) for e in self._examples]
        several = any("\n" in text for pair in asked for text in pair)
        lines = (q + ("" if q.endswith("\n") else " ") + answer for q, answer in asked)
        return "".join(line + ("\n\n" if several else "\n") for line in lines)

    def _question(self, entry: dict[str, Any]) -> str:
        """The question, up to where the answer begins: no space at the end, which would change the tokens."""
        if self.format == "compact":
            return f"{entry['metadata']['expression']} ="
        question = str(entry["question"]).strip()
        return question + "\n" if "\n" in question else question


def scorer(task: str, options: dict[str, Any]) -> Callable[[str | None, dict[str, Any]], float]:
    """The task's own `score_answer(answer, entry)`; some judge by the options that made the question."""
    score: Callable[[str | None, dict[str, Any]], float] = _dataset(
        task, json.dumps(options, sort_keys=True), 0
    ).score_answer
    return score


@functools.lru_cache(maxsize=64)
def _dataset(task: str, options: str, seed: int) -> Any:
    import reasoning_gym as gym

    try:
        return gym.create_dataset(task, seed=seed, size=_BLOCK, **json.loads(options))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses the options {options} of task {task}: {error}") from error


def _hash(text: str, bits: int) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - bits)


def _plain(value: Any) -> Any:
    """As JSON has it: numpy as numbers and lists, sets sorted, and what JSON can't say as text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(v) for v in value), key=repr)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
