"""Progress of a pull on stderr: a bar on a terminal, one line elsewhere, nothing when asked to be quiet."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Reporter:
    """Stages of one pull. `stage` names what happens now, `advance` moves the bar of a stage with a total.

    Off a terminal the first stage's text is the only line that is written.
    """

    def __init__(self, title: str, *, enabled: bool) -> None:
        self._title = title
        self._line = enabled and not sys.stderr.isatty()
        self._bar: Progress | None = _bar() if enabled and sys.stderr.isatty() else None
        self._task = self._bar.add_task(title, total=None) if self._bar else None

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def stage(self, text: str, *, total: int | None = None) -> None:
        """Begin a stage; `total` counts its steps, None draws a bar of unknown length."""
        if self._line:
            self._line = False
            print(f"{self._title}: {text}", file=sys.stderr, flush=True)
        if self._bar and self._task is not None:
            self._bar.reset(self._task, total=total, description=f"{self._title}: {text}")

    def advance(self) -> None:
        if self._bar and self._task is not None:
            self._bar.advance(self._task)

    def done(self, text: str) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=f"{self._title}: {text}", total=1, completed=1)


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    return Progress(text, BarColumn(bar_width=30), TimeElapsedColumn(), console=Console(stderr=True))
