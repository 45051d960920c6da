"""Stop strings: text, found in the tokens that make it. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


def tokenizer_of(model_dir: str) -> Tokenizer | None:
    """The tokenizer beside a model; None where there is none, and stop strings can't be had."""
    file = Path(model_dir, "tokenizer.json")
    return Tokenizer.from_file(str(file)) if file.exists() else None


class StopStrings:
    """Watches a growing response for stop strings, decoding only its newest tokens."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._keep = max(map(len, stops)) - 1  # characters of settled text that a stop string may begin in
        self._tail = ""
        self._start = self._settled = 0  # tokens [start, settled) give context to the ones after them

    def completed(self, ids: list[int]) -> bool:
        """Whether the last of `ids` completes a stop string. Call once after each token."""
        context: str = self._tokenizer.decode(ids[self._start : self._settled], skip_special_tokens=False)
        text: str = self._tokenizer.decode(ids[self._start :], skip_special_tokens=False)
        window = self._tail + text[len(context) :]
        if not text.endswith("\ufffd"):  # else the token ends inside a character: decode it again later
            self._start, self._settled = self._settled, len(ids)
            self._tail = window[-self._keep :] if self._keep else ""
        return any(stop in window for stop in self._stops)


class Stops:
    """Finds stop strings in whole responses; the tokenizer is read when it is first needed."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._tokenizer: Tokenizer | None = None

    def end(self, ids: Sequence[int], stops: tuple[str, ...]) -> int | None:
        """How many of the tokens it takes to complete the first stop string; None when they complete none."""
        self._tokenizer = self._tokenizer or tokenizer_of(self._model_dir)
        if self._tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer.json in {self._model_dir}")
        decode = self._tokenizer.decode

        def holds(length: int) -> bool:
            text = decode(ids[:length], skip_special_tokens=False)
            return any(stop in text for stop in stops)

        return bisect_left(range(len(ids)), True, key=holds) if holds(len(ids)) else None
