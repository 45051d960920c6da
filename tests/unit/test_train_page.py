"""docs/train.md is a script: every block of text is what the block of Python before it prints.

`python -m tests.unit.test_train_page` writes what they print into the page.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/train.md"


def run(page: str) -> str:
    """The page, with what its blocks print, one after the other in one namespace."""
    names: dict[str, object] = {}

    def ran(block: re.Match[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block[1], str(PAGE), "exec"), names)
        return f"```python\n{block[1]}```\n\n```text\n{out.getvalue()}```\n"

    return re.sub(r"```python\n(.*?)```\n(?:\n```text\n.*?```\n)?", ran, page, flags=re.DOTALL)


def test_the_page_that_walks_a_batch_through_training_is_true() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert run(page) == page
    assert page.count("```python") == 7


if __name__ == "__main__":
    PAGE.write_text(run(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
