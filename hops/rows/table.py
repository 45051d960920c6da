"""Rows of a JSON Lines or parquet file with named columns, as verl, slime and TRL write them."""

from __future__ import annotations

import functools
from typing import Any

from hops.rows.example import Example, Messages, near
from hops.rows.files import JsonLines, Reader, check_file, open_file

LAYOUTS = (
    ("verl", "prompt", "reward_model.ground_truth"),
    ("slime", "prompt", "label"),
    ("slime", "input", "label"),
    ("TRL", "prompt", "ground_truth"),
    ("TRL", "prompt", "solution"),
    ("TRL", "prompt", "answer"),
)
"""Who writes it, the prompt's column, the ground truth's column; the first that fits is taken."""


def table(
    *,
    path: str,
    prompt: str | None = None,
    ground_truth: str | None = None,
    keep: list[str] | None = None,
    chat: bool = False,
    system: str | None = None,
) -> TableRows:
    """A source of the rows of a file, in the file's order.

    prompt, ground_truth: columns, or paths into them with dots (`reward_model.ground_truth`). Without them
    the layouts of verl, slime and TRL are recognised. `ground_truth: ""` means that the rows have none.
    keep: which other columns travel to the reward function (default: all)
    chat: a prompt that is text becomes one user message; a list of messages is a chat anyway
    system: a system message in front of a chat that has none
    Raises ValueError for a file that is missing, empty or of another kind, or for columns that it lacks.
    """
    check_file(path)
    rows = TableRows(path, prompt, ground_truth, keep, chat, system)
    if not path.endswith(".parquet"):
        rows.check_first()
    return rows


class TableRows:
    """See `table`. The file is read when the first row is asked for."""

    def __init__(
        self,
        path: str,
        prompt: str | None,
        ground_truth: str | None,
        keep: list[str] | None,
        chat: bool,
        system: str | None,
    ) -> None:
        self.path, self.keep, self.chat, self.system = path, keep, chat, system
        self._prompt_column, self._truth_column = prompt, ground_truth

    def __len__(self) -> int:
        return len(self._reader)

    def __call__(self, index: int) -> Example:
        """Row `index`; IndexError past the last, ValueError with file, line and column for a bad one."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} rows; ask for no more")
        prompt, truth = self._columns
        return self._example(self._reader[index], prompt, truth, self.where(index))

    def where(self, index: int) -> str:
        return self._reader.where(index)

    def check_first(self) -> None:
        """Raise ValueError when the first row of a JSON Lines file shows that the columns do not fit."""
        first = JsonLines(self.path, first_only=True)
        prompt, truth = self._fit(first[0])
        self._example(first[0], prompt, truth, first.where(0))

    @functools.cached_property
    def _reader(self) -> Reader:
        return open_file(self.path)

    @functools.cached_property
    def _columns(self) -> tuple[str, str]:
        return self._fit(self._reader[0])

    def _fit(self, row: dict[str, Any]) -> tuple[str, str]:
        """The columns of prompt and ground truth: as given, the rest from the first layout that fits."""
        prompt, truth = self._prompt_column, self._truth_column
        if prompt is not None and truth is not None:
            return prompt, truth
        for _, its_prompt, its_truth in LAYOUTS:
            fits = (its_prompt if prompt is None else prompt), (its_truth if truth is None else truth)
            if all(not column or _has(row, column) for column in fits):
                return fits
        for name, column in (("prompt", prompt), ("ground_truth", truth)):
            if column and not _has(row, column):
                raise ValueError(
                    f"{self.path} has no column {column!r}, which {name}: names; "
                    f"{near(column, row)}it has {', '.join(row)}"
                )
        layouts = "; ".join(f"{p} and {t} ({who})" for who, p, t in LAYOUTS)
        raise ValueError(
            f"{self.path} has the columns {', '.join(row)}, which fit no known layout: {layouts}. "
            'Name the columns with prompt: and ground_truth: (ground_truth: "" if there is none)'
        )

    def _example(self, row: dict[str, Any], prompt: str, truth: str, where: str) -> Example:
        asked = self._prompt(_value(row, prompt, where), f"{where}, column {prompt}")
        others = {k: v for k, v in row.items() if k != prompt}
        value = None
        if truth:
            value = _plain(_value(row, truth, where), f"{where}, column {truth}")
            others = _without(others, truth)
        if self.keep is not None:
            for name in self.keep:
                _value(row, name, where)
            others = {k: v for k, v in others.items() if k in self.keep}
        columns = {k: _plain(v, f"{where}, column {k}") for k, v in others.items()}
        name = truth if truth in row else truth.rpartition(".")[2]
        return Example(asked, value, name or "ground_truth", columns)

    def _prompt(self, value: Any, where: str) -> str | Messages:
        if isinstance(value, str) and value and self.chat:
            messages: Messages = [{"role": "user", "content": value}]
        elif isinstance(value, str) and value:
            if self.system is not None:
                raise ValueError(
                    f"{where}: a system message needs a chat, and this prompt is text; add chat: true"
                )
            return value
        elif isinstance(value, list) and value:
            messages = [_message(m, where) for m in value]
        else:
            what = (
                "empty"
                if value in ("", [])
                else f"a {type(value).__name__}, neither text nor a list of messages"
            )
            raise ValueError(
                f"{where}: the prompt is {what}; name another column with prompt:, or mend the row"
            )
        if self.system is None:
            return messages
        if messages[0]["role"] == "system":
            raise ValueError(f"{where}: the chat has a system message already; leave system: out")
        return [{"role": "system", "content": self.system}, *messages]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        raise ValueError(f"{where}: {value!r:.80} is no message; write {{role, content}}")
    if not isinstance(value["role"], str) or not isinstance(value["content"], str):
        raise ValueError(
            f"{where}: role and content of a message are text, not {value!r:.80}; write them as strings"
        )
    # parquet gives every message the fields of all messages, None where it has none
    return {k: _plain(v, where) for k, v in value.items() if v is not None}


def _has(row: dict[str, Any], path: str) -> bool:
    at: Any = row
    if path in row:
        return True
    for part in path.split("."):
        if not isinstance(at, dict) or part not in at:
            return False
        at = at[part]
    return True


def _value(row: dict[str, Any], path: str, where: str) -> Any:
    if not _has(row, path):
        raise ValueError(
            f"{where}: no column {path!r}; {near(path, row)}the row has {', '.join(row) or 'none'}"
        )
    if path in row:
        return row[path]
    return functools.reduce(lambda at, part: at[part], path.split("."), row)


def _without(row: dict[str, Any], path: str) -> dict[str, Any]:
    """The row less what `path` names; a mapping that is left empty goes too."""
    if path in row:
        return {k: v for k, v in row.items() if k != path}
    first, _, rest = path.partition(".")
    inner = _without(row[first], rest)
    return {k: inner if k == first else v for k, v in row.items() if k != first or inner}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v, where) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v, where) for v in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(
        f"{where}: a {type(value).__name__} is no JSON and can't travel to the reward function; "
        "list the columns that it needs with keep:, or store this one as text"
    )
