"""The page in a real browser: it shows what the audit says, its toggles and keys work, and it asks for nothing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import flowgraph
from bench.compile import ring
from flowgraph.report.audit import Audit
from flowgraph.spec.units import per_step, size_text
from tests.browser.chromium import Page

TOY = Path(__file__).parents[1] / "runtime" / "toy.yaml"
SHOWN = "document.querySelector('[data-view]:not([hidden])')"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> flowgraph.Outcome:
    return flowgraph.run(TOY, steps=2, executor="inproc", runs=tmp_path_factory.mktemp("runs"), live=False)


@pytest.fixture(scope="module")
def priced(run: flowgraph.Outcome) -> Audit:
    return flowgraph.audit(flowgraph.load(TOY, {"run.steps": 2}), run.directory)


@pytest.fixture(scope="module")
def file(run: flowgraph.Outcome, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "ring.html"
    path.write_text(flowgraph.draw(flowgraph.load(TOY, {"run.steps": 2}), "html", measured=run.directory))
    return path


@pytest.fixture
def page(file: Path) -> Iterator[Page]:
    with Page(1100, 900) as made:
        made.open(file)
        yield made
        assert made.console == []
        assert made.requests == [file.resolve().as_uri()]


def choose(page: Page, group: str, value: str) -> None:
    page.click(f"input[name={group}][value={value}]")


def cell(page: Page, seam: str, name: str) -> str:
    """The text under a heading in a seam's row of the table that is shown."""
    script = f"""(() => {{ const table = {SHOWN}.querySelector('table.seams');
      const at = [...table.querySelectorAll('th')].findIndex((th) => th.textContent === {json.dumps(name)});
      const row = [...table.querySelectorAll('[data-row]')].find((r) => r.dataset.row === {json.dumps(seam)});
      return at < 0 ? null : row.cells[at].textContent; }})()"""
    return str(page.evaluate(script))


def test_the_toggles_change_the_numbers_to_those_of_the_audit(page: Page, priced: Audit) -> None:
    def total() -> list[str]:
        found: list[str] = page.evaluate(
            f"[...{SHOWN}.querySelectorAll('.totals b')].map((b) => b.textContent)"
        )
        return found

    seam = next(s for s in priced.seams if (s.source, s.reader) == ("batch", "train"))
    assert total() == [per_step(priced.total.mean), per_step(priced.driver.mean)]
    assert cell(page, "batch→train", "read") == size_text(seam.mean)
    choose(page, "bytes", "measured")
    assert seam.measured is not None
    assert cell(page, "batch→train", "measured") == size_text(seam.measured)
    assert cell(page, "batch→train", "difference") == "0.0%"
    assert seam.naive is not None
    assert cell(page, "batch→train", "naive base64") == size_text(seam.naive.controller_base64)
    measured = total()
    choose(page, "plan", "naive")  # which nothing measures, so it is predicted again
    assert page.evaluate("[...document.querySelectorAll('input:disabled')].map((i) => i.value)") == [
        "measured"
    ]
    assert page.evaluate("document.getElementById('why').innerText") == "a run measures the compiled plan"
    assert page.evaluate("document.querySelector('[name=bytes]:checked').value") == "predicted"
    assert priced.naive is not None
    naive = total()
    assert naive[1] == per_step(priced.naive.controller_raw)
    compiled = [per_step(priced.total.mean), per_step(priced.driver.mean)]
    assert len({tuple(measured), tuple(naive), tuple(compiled)}) == 3
    choose(page, "plan", "compiled")
    assert total() == compiled
    assert page.evaluate("document.querySelectorAll('input:disabled').length") == 0
    pictures = page.evaluate(
        "[...document.querySelectorAll('[data-view]')].map((v) => v.querySelector('svg').textContent)"
    )
    assert len(set(pictures)) == 3


def test_a_table_is_sorted_by_what_it_means(page: Page, priced: Audit) -> None:
    def order() -> list[str]:
        found: list[str] = page.evaluate(
            f"[...{SHOWN}.querySelectorAll('[data-row]')].map((r) => r.dataset.row)"
        )
        return found

    by_bytes = [f"{s.source}→{s.reader}" for s in priced.seams]
    assert order() == by_bytes
    heading = "[data-view]:not([hidden]) table.seams th:nth-child({}) button"
    page.click(heading.format(1))
    assert order() == sorted(by_bytes, key=lambda s: s.replace("→", " → "))
    page.click(heading.format(3))
    sizes = {f"{s.source}→{s.reader}": s.mean for s in priced.seams}
    assert [sizes[s] for s in order()] == sorted(sizes.values(), reverse=True)
    page.click(heading.format(3))
    assert [sizes[s] for s in order()] == sorted(sizes.values())
    assert page.evaluate(f"{SHOWN}.querySelector('th:nth-child(3)').getAttribute('aria-sort')") == "ascending"


def test_what_is_unknown_is_sorted_last_whichever_way(page: Page) -> None:
    choose(page, "bytes", "measured")
    for direction in ("descending", "ascending"):
        page.evaluate(
            f"[...{SHOWN}.querySelectorAll('table.seams th')].find((t) => t.innerText === 'measured')"
            ".firstChild.click()"
        )
        assert page.evaluate(f"{SHOWN}.querySelector('[aria-sort]').getAttribute('aria-sort')") == direction
        shown = page.evaluate(
            f"[...{SHOWN}.querySelectorAll('[data-row]')].map((r) => r.cells[7].dataset.v ?? null)"
        )
        known = [float(value) for value in shown if value is not None]
        assert known == sorted(known, reverse=direction == "descending")
        assert shown[len(known) :] == [None] * (len(shown) - len(known))
        assert 0 < len(known) < len(shown)


def test_a_row_opens_to_its_fields_and_they_stay_with_it(page: Page, priced: Audit) -> None:
    seam = next(s for s in priced.seams if (s.source, s.reader) == ("batch", "reward"))
    page.evaluate(f"{SHOWN}.querySelector('[data-row=\"batch→reward\"] button').focus()")
    below = f"{SHOWN}.querySelector('[data-row=\"batch→reward\"]').nextElementSibling"
    assert page.evaluate(f"{below}.hidden")
    page.press("Enter", 13, "\r")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    text = page.evaluate(f"{below}.innerText")
    for field in seam.fields:
        assert field.port in text
        assert field.type in text
        assert size_text(field.max) in text
        assert field.naive is not None
        assert size_text(field.naive.controller_raw) in text
    page.click("[data-view]:not([hidden]) table.seams th:nth-child(1) button")
    assert page.evaluate(f"{below}.innerText") == text
    page.evaluate(f"{SHOWN}.querySelector('[data-row=\"batch→reward\"] button').focus()")
    page.press(" ", 32, " ")
    assert page.evaluate(f"{below}.hidden")


def test_a_hop_opens_by_key_and_by_mouse_and_says_what_it_is(page: Page) -> None:
    page.click("[data-view]:not([hidden]) [data-hop=advantage]")
    shown = page.evaluate("document.querySelector('[data-about]:not([hidden])').innerText")
    assert "hop grpo(" in shown
    assert "score: f32[leaf],  # reward.score" in shown
    assert "f32[token] TiledOver(leaf)" in shown
    assert "(s_i − mean)" in shown  # of its docstring
    page.press("Escape", 27)
    assert page.evaluate("document.getElementById('panel').hidden")
    assert page.evaluate("document.activeElement.dataset.hop") == "advantage"
    page.press("Enter", 13, "\r")
    assert page.evaluate("document.activeElement.id") == "close"
    page.press("Enter", 13, "\r")
    assert page.evaluate("document.getElementById('panel').hidden")
    page.click("[data-view]:not([hidden]) [data-hop=rollout]")
    shown = page.evaluate("document.querySelector('[data-about]:not([hidden])').innerText")
    assert "blocks of rollout, until consumed" in shown
    assert "the driver holds them" in shown


def test_everything_can_be_reached_by_tab(page: Page, priced: Audit) -> None:
    name = "((a) => a.dataset.hop ?? a.dataset.seam ?? (a.value || a.textContent))(document.activeElement)"
    reached = []
    for _ in range(120):
        page.press("Tab", 9)
        reached.append(page.evaluate(name))
    hops = {*(s.source for s in priced.seams), *(s.reader for s in priced.seams)}
    assert hops <= set(reached)
    assert {f"{s.source}→{s.reader}" for s in priced.seams} <= set(reached)
    assert {"compiled", "predicted"} <= set(reached)
    assert "through the driver" in reached


def test_a_seam_and_its_row_are_one(page: Page) -> None:
    click = "dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    page.evaluate(f"{SHOWN}.querySelector('[data-seam=\"batch→train\"]').{click}")
    assert page.evaluate(f"[...{SHOWN}.querySelectorAll('tr.on')].map((r) => r.dataset.row)") == [
        "batch→train"
    ]
    assert page.evaluate(f"{SHOWN}.querySelector('[aria-current]').dataset.row") == "batch→train"
    page.click("[data-view]:not([hidden]) tr[data-row='batch→reward'] td:nth-child(2)")
    assert page.evaluate(f"{SHOWN}.querySelector('g.on').dataset.seam") == "batch→reward"


def test_the_states_are_counted(page: Page) -> None:
    text = page.evaluate("document.querySelector('table.census').innerText")
    assert "fold dispatch" in text
    assert "complexity" in page.evaluate("document.querySelector('main').innerText")


def test_it_is_dark_where_that_is_preferred_and_shows_something(
    page: Page, file: Path, tmp_path: Path
) -> None:
    def back() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light, day = back(), page.screenshot(tmp_path / "light.png")
    page.scheme(True)
    assert back() != light
    night = page.screenshot(tmp_path / "dark.png")
    for png in (day, night):
        assert png.startswith(b"\x89PNG")
        assert len(set(_pixels(png))) > 50  # text, lines and hues; a blank page has one
    assert day != night


def _pixels(png: bytes) -> bytes:
    """The bytes of all rows of a PNG that is not interlaced, as they are filtered."""
    data, at = b"", 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    return zlib.decompress(data)


def test_without_a_run_nothing_is_measured_and_a_plan_alone_has_no_naive_form(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(flowgraph.draw(flowgraph.compile(TOY), "html"))
    with Page() as made:
        made.open(path)
        off = "[...document.querySelectorAll('input:disabled')].map((i) => i.value)"
        assert made.evaluate(off) == ["naive", "measured"]
        by = made.evaluate("document.querySelector('input:disabled').getAttribute('aria-describedby')")
        assert made.evaluate(f"document.getElementById('{by}').innerText") == (
            "naive is known of a graph, and not of a plan alone; measured: give --run DIR of a run"
        )
        assert made.console == []


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    doc = "</script><script>alert(1)</script> \"quoted\" '&amp;' <b>bold</b> 漢字 \u202eabc"
    path = tmp_path / "hostile.html"
    path.write_text(flowgraph.draw(flowgraph.load(TOY, {"doc": doc, "graph": "a_b"}), "html"))
    with Page() as made:
        made.open(path)
        assert made.evaluate("document.querySelector('header p').textContent") == doc
        assert made.evaluate("document.querySelectorAll('script').length") == 1
        assert made.evaluate("document.querySelectorAll('header b').length") == 0
        assert made.console == []


def test_a_hostile_docstring_stays_text(tmp_path: Path) -> None:
    plan = flowgraph.compile(TOY)
    doc = "</script><img src=x onerror=alert(1)> \ud800 \0 \u202eabc &amp;\n\n    kept\n      as it is"
    hop = msgspec.structs.replace(plan.hops["advantage"], doc=doc, place='"a" <b>.py:1:1')
    path = tmp_path / "doc.html"
    path.write_text(
        flowgraph.draw(msgspec.structs.replace(plan, hops={**plan.hops, "advantage": hop}), "html")
    )
    with Page() as made:
        made.open(path)
        made.click("[data-hop=advantage]")
        paragraphs = made.evaluate(
            "[...document.querySelectorAll('[data-about]:not([hidden]) p')].map((p) => p.textContent)"
        )
        assert paragraphs == [
            doc.split("\n")[0].replace("\ud800", "\ufffd").replace("\0", "\ufffd"),
            doc.split("\n\n")[1],
        ]
        assert '"a" <b>.py:1:1' in made.evaluate(
            "document.querySelector('[data-about]:not([hidden])').textContent"
        )
        assert made.evaluate("document.querySelectorAll('img').length") == 0
        assert (made.console, made.requests) == ([], [path.resolve().as_uri()])


@pytest.mark.parametrize("width", [1100, 1600])
def test_a_ring_fits_the_window_and_its_texts_can_be_read(file: Path, width: int) -> None:
    with Page(width, 900) as made:
        made.open(file)
        assert made.evaluate("document.documentElement.scrollWidth") == width
        assert (
            made.evaluate(
                f"(({{scrollWidth: a, clientWidth: b}}) => a - b)({SHOWN}.querySelector('.picture'))"
            )
            == 0
        )
        assert made.evaluate(f"10 * {SHOWN}.querySelector('svg').getScreenCTM().a") >= 9


def test_owners_are_priced_and_their_share_of_a_run_is_told(page: Page, priced: Audit) -> None:
    rows = page.evaluate(
        "[...document.querySelectorAll('table.owners tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    assert [row[0] for row in rows] == [one.owner for one in priced.processes]
    assert [row[2] for row in rows] == [size_text(one.mean) for one in priced.processes]
    measured = [one.measured for one in priced.processes if one.measured is not None]
    assert [row[4] for row in rows] == [size_text(nbytes) for nbytes in measured]
    assert all(0 <= int(row[-1].removesuffix("%")) <= 100 for row in rows)


def test_a_graph_of_a_thousand_hops_opens_and_answers(tmp_path: Path) -> None:
    graph = tmp_path / "ring.yaml"
    graph.write_text(ring(1_000))
    path = tmp_path / "ring.html"
    path.write_text(flowgraph.draw(graph, "html"))
    with Page() as made:
        made.open(path)
        assert made.console == []
        choose(made, "plan", "naive")
        assert made.evaluate(f"{SHOWN}.dataset.view") == "naive-predicted"
        assert made.evaluate(f"{SHOWN}.querySelectorAll('[data-hop]').length") == 1_000
        made.click("[data-view]:not([hidden]) table.seams th:nth-child(3) button")
        made.evaluate(f"{SHOWN}.querySelector('[data-hop=dispatch]').focus()")
        made.press("Enter", 13, "\r")
        assert not made.evaluate("document.getElementById('panel').hidden")


def test_the_same_graph_gives_the_same_page(file: Path, run: flowgraph.Outcome) -> None:
    again = flowgraph.draw(flowgraph.load(TOY, {"run.steps": 2}), "html", measured=run.directory)
    assert file.read_text() == again
    assert len(again) < 400_000
    assert "http" not in again.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
