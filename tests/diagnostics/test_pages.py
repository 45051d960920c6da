"""Every page of docs/codes is a test: its example is answered with exactly its text, the mended one with nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgraph.spec.codes import CODES, page
from tests.diagnostics import pages

ALL = {path.stem: path for path in sorted(pages.PAGES.glob("*.md"))}
LONGEST = 100  # lines of a page: two screens


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, from which `mine` is imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("code", ALL)
@pytest.mark.usefixtures("here")
def test_the_example_gets_exactly_its_text(code: str) -> None:
    one = pages.parse(ALL[code])
    assert f"error[{code}]" in one.text
    assert pages.steady(one.example.answer() + "\n") == pages.steady(one.text)


@pytest.mark.parametrize("code", ALL)
@pytest.mark.usefixtures("here")
def test_what_is_to_be_used_instead_has_no_findings_and_runs(code: str) -> None:
    assert pages.parse(ALL[code]).mended.answer() == ""


@pytest.mark.parametrize("code", CODES)
def test_a_page_has_its_title_and_four_sections_on_two_screens(code: str) -> None:
    one = pages.parse(ALL[code])
    assert one.title == f"# {code}: {CODES[code]}"
    assert list(one.sections) == pages.SECTIONS
    assert all(len(text.split()) > 10 for text in one.sections.values())
    assert page(code).count("\n") <= LONGEST


def test_there_is_a_page_for_every_code_and_no_other() -> None:
    assert list(ALL) == list(CODES)


def test_a_page_is_told_as_it_lies_in_the_docs_and_an_unknown_code_has_none() -> None:
    assert all(page(code) == path.read_text(encoding="utf-8") for code, path in ALL.items())
    with pytest.raises(KeyError):
        page("FG999")


def test_an_empty_text_is_filled_with_what_is_said(here: Path) -> None:
    one = pages.parse(ALL["FG303"])
    draft = here / "FG303.md"
    draft.write_text(page("FG303").replace(one.text, ""))
    pages.fill(draft)
    assert pages.steady(draft.read_text()) == pages.steady(page("FG303"))
