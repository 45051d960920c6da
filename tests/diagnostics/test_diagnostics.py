"""Every Markdown file here is a test: a ```yaml graph, then a ```text fence with exactly what is said of it.

So is every page of docs/codes, whose mended graph has nothing said of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowgraph.passes.pipeline import load
from flowgraph.spec.codes import CODES, page
from flowgraph.spec.render import render
from tests.diagnostics import pages

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "flowgraph"
SECTION = re.compile(
    r"^## (?P<title>.+?)\n.*?^```yaml\n(?P<yaml>.*?)^```\n.*?^```text\n(?P<text>.*?)^```", re.M | re.S
)
CASES = {
    f"{f.stem}: {m['title']}": (m["yaml"], m["text"])
    for f in sorted(HERE.glob("*.md"))
    for m in SECTION.finditer(f.read_text())
}
LONGEST = 100  # lines of a page: two screens


def findings() -> str:
    loaded = load("graph.yaml")
    return render(loaded.diagnostics, loaded.sources) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_a_graph_gets_exactly_these_findings(case: str, here: Path) -> None:
    text, expected = CASES[case]
    (here / "graph.yaml").write_text(text)
    assert findings() == expected


@pytest.mark.parametrize("code", pages.CHECKED)
def test_the_example_of_a_page_gets_exactly_its_text(code: str, here: Path) -> None:
    one = pages.ALL[code]
    one.case.write(here)
    assert pages.steady(findings()) == pages.steady(one.text)
    assert f"error[{code}]" in one.text


@pytest.mark.parametrize("code", pages.ALL)
def test_what_a_page_says_to_use_instead_has_no_findings(code: str, here: Path) -> None:
    pages.ALL[code].mended.write(here)
    assert findings() == "\n"


@pytest.mark.parametrize("code", CODES)
def test_a_page_has_its_title_and_four_sections_on_two_screens(code: str) -> None:
    one = pages.ALL[code]
    assert one.title == f"# {code}: {CODES[code]}"
    assert list(one.sections) == pages.SECTIONS
    assert all(len(text.split()) > 10 for text in one.sections.values())
    assert page(code).count("\n") <= LONGEST


def test_a_page_is_printed_as_it_lies_in_the_docs_and_an_unknown_code_has_none() -> None:
    for code in CODES:
        assert page(code) == (pages.PAGES / f"{code}.md").read_text(encoding="utf-8")
    with pytest.raises(KeyError):
        page("FG999")


def test_every_section_is_a_case() -> None:
    sections = sum(file.read_text().count("\n## ") for file in HERE.glob("*.md"))
    assert len(CASES) == sections > 25


def test_codes_of_the_source_the_table_the_pages_and_the_cases_are_the_same() -> None:
    files = [f for f in SOURCE.rglob("*.py") if f.name != "codes.py"]
    said = {code for f in files for code in re.findall(r"FG[1-9]\d\d", f.read_text())}
    texts = [text for _, text in CASES.values()] + [one.text for one in pages.ALL.values()]
    reached = {code for text in texts for code in re.findall(r"error\[(FG\d{3})\]", text)}
    assert said == set(CODES) == set(pages.ALL) == reached


def test_every_finding_but_an_unreadable_file_has_a_case_beside_its_page() -> None:
    reached = {code for _, text in CASES.values() for code in re.findall(r"error\[(FG\d{3})\]", text)}
    assert reached == set(pages.CHECKED) - {
        "FG100"
    }  # its case is bytes that are no text, as the page saves them


def test_codes_are_in_order_and_titles_are_one_line() -> None:
    assert list(CODES) == sorted(CODES)
    assert all(title and "\n" not in title and not title.endswith(".") for title in CODES.values())
