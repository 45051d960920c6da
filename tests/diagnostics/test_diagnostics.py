"""Every Markdown file here is a test: a ```yaml graph, then a ```text fence with exactly what is said of it.

The pages of docs/codes are tests too, see `test_pages.py`. A code's page has one case; its other forms are here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowgraph.passes.pipeline import load
from flowgraph.plan.compile import finish
from flowgraph.spec.codes import CODES
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


@pytest.mark.parametrize("case", CASES)
def test_a_graph_gets_exactly_these_findings(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, expected = CASES[case]
    monkeypatch.chdir(tmp_path)
    Path("graph.yaml").write_text(text)
    loaded = load("graph.yaml")
    finish(loaded)
    assert render(loaded.diagnostics, loaded.sources) + "\n" == expected


def test_every_section_is_a_case() -> None:
    sections = sum(file.read_text().count("\n## ") for file in HERE.glob("*.md"))
    assert len(CASES) == sections > 25


def test_codes_of_the_source_of_the_table_and_of_cases_are_the_same() -> None:
    files = [f for f in SOURCE.rglob("*.py") if f.name != "codes.py"]
    said = {code for f in files for code in re.findall(r"FG[1-9]\d\d", f.read_text())}
    told = [pages.parse(path).text for path in pages.PAGES.glob("*.md")]
    reached = {code for text in told for code in re.findall(r"error\[(FG\d{3})\]", text)}
    assert said == set(CODES) == reached


def test_every_finding_has_a_case_beside_its_page() -> None:
    reached = {code for _, text in CASES.values() for code in re.findall(r"error\[(FG\d{3})\]", text)}
    # The case of FG100 is no text, and FG114 is found only where a graph is to run: their pages have the cases.
    assert reached | {"FG100", "FG114"} == {code for code in CODES if code < "FG900"}


def test_codes_are_in_order_and_titles_are_one_line() -> None:
    assert list(CODES) == sorted(CODES)
    assert all(title and "\n" not in title and not title.endswith(".") for title in CODES.values())
