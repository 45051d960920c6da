"""Readers of JSON Lines and parquet files: how many rows, row i as a mapping, and how an error names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec


class Reader(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...


def check_file(path: str) -> None:
    """Raise ValueError for what can be seen without reading it all: missing, of an unknown kind, empty."""
    file = Path(path)
    if not file.exists():
        raise ValueError(
            f"{path} does not exist (looked in {Path.cwd()}); give the path of a .jsonl or .parquet file"
        )
    if not file.is_file():
        raise ValueError(f"{path} is no file; give the path of a .jsonl or .parquet file")
    if file.suffix not in (".jsonl", ".ndjson", ".json", ".parquet"):
        raise ValueError(f"{path} is neither .jsonl nor .parquet; convert it to one of them")
    if file.stat().st_size == 0:
        raise ValueError(f"{path} is empty; it needs at least one row")
    if file.suffix == ".parquet":
        with file.open("rb") as stream:
            if stream.read(4) != b"PAR1":
                raise ValueError(f"{path} is no parquet file: it does not begin with PAR1; write it again")
    else:
        JsonLines(path, first_only=True)


def open_file(path: str) -> Reader:
    """Read the file once. Raises ValueError naming file and line for what can't be read."""
    check_file(path)
    return Parquet(path) if path.endswith(".parquet") else JsonLines(path)


class JsonLines:
    """One JSON object a line; blank lines do not count.

    Every line is parsed once now, so that a bad one is found before the first step and not at step 900; the
    bytes are kept, not the objects.
    """

    def __init__(self, path: str, *, first_only: bool = False) -> None:
        self.path = path
        self._lines: list[tuple[int, bytes]] = []
        with open(path, "rb") as stream:
            for number, line in enumerate(stream, 1):
                text = line.removeprefix(b"\xef\xbb\xbf").strip()
                if text:
                    self._lines.append((number, text))
                    self[len(self._lines) - 1]
                    if first_only:
                        return
        if not self._lines:
            raise ValueError(f"{path} has no rows, only blank lines; it needs at least one JSON object")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, text = self._lines[index]
        try:
            row = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            more = "; it holds one JSON array: write one object a line" if text == b"[" else ""
            raise ValueError(f"{self.path}:{number}: no JSON ({error}){more or '; mend the line'}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.path}:{number}: a JSON {type(row).__name__}; write one object a line")
        return row

    def where(self, index: int) -> str:
        return f"{self.path}:{self._lines[index][0]}"


class Parquet:
    """A parquet file, held as arrow columns."""

    def __init__(self, path: str) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} can't be read as parquet: {error}; write it again") from error
        if not len(self):
            raise ValueError(f"{path} has no rows; it needs at least one")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row

    def where(self, index: int) -> str:
        return f"{self.path} row {index}"
