"""What is drawn is legible in a real browser at 1,100 px: every text has its room, light and dark."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flowgraph
from flowgraph.plan.plan import Plan
from flowgraph.report.draw import draw
from flowgraph.report.draw.colours import DARK, LIGHT, TEXT_DARK, TEXT_LIGHT
from tests.browser.chromium import Page
from tests.unit import plans
from tests.unit.test_draw import random_plan

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "graphs" / "quickstart.yaml"
WIDTH = 1100
SMALLEST = 9.0  # px of a font, as it is rendered
# Every text with its box, its group and its colour; the box of every hop; points along every line.
MEASURE = """
(() => {
  const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const group = (e) => { const g = e.closest('[data-hop],[data-seam]');
    return g ? (g.dataset.hop ?? g.dataset.seam) : ''; };
  const texts = [...document.querySelectorAll('text')].map((e) => ({text: e.textContent, box: box(e), group: group(e),
    size: Math.min(...[e, ...e.querySelectorAll('tspan')].map((t) => parseFloat(getComputedStyle(t).fontSize)))
      * e.getScreenCTM().a, colour: getComputedStyle(e).fill}));
  const hops = [...document.querySelectorAll('rect.box')].map((e) => ({text: group(e), box: box(e)}));
  const lines = [...document.querySelectorAll('path.line')].filter((e) => group(e)).map((e) => {
    const m = e.getScreenCTM(), n = e.getTotalLength(), points = [];
    for (let at = 0; at <= n; at += 4) { const p = e.getPointAtLength(at).matrixTransform(m); points.push([p.x, p.y]); }
    return {group: group(e), points}; });
  const back = getComputedStyle(document.querySelector('rect.bg')).fill;
  return {texts, hops, lines, back, width: document.documentElement.clientWidth,
    whole: [document.documentElement.scrollWidth, document.documentElement.scrollHeight]};
})()
"""
Box = tuple[float, float, float, float]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with Page(WIDTH, 900) as made:
        yield made


def show(page: Page, svg: str, folder: Path) -> Any:
    """The picture as an <img> would be too wide to look into: inline, in a page without margins."""
    file = folder / "picture.html"
    file.write_text(
        f"<!doctype html><meta charset=utf-8><style>body{{margin:0}}svg{{display:block}}</style>{svg}"
    )
    page.open(file)
    return page.evaluate(MEASURE)


def overlap(a: Box, b: Box, slack: float = 1.0) -> bool:
    """Whether two boxes share more than `slack` px each way: a font's box is higher than its letters."""
    return a[0] + slack < b[2] and b[0] + slack < a[2] and a[1] + slack < b[3] and b[1] + slack < a[3]


def collisions(found: Any) -> list[tuple[str, str]]:
    """Texts that overlap, and texts on the box of a hop that is not theirs."""
    texts = [(t["text"], tuple(t["box"]), t["group"]) for t in found["texts"] if t["text"].strip()]
    # Lines of one text stand 13 px apart, and a font's box may be higher.
    pairs = [(a[0], b[0]) for a, b in itertools.combinations(texts, 2) if overlap(a[1], b[1], 2.5)]
    hops = [
        (text, hop["text"])
        for text, box, group in texts
        for hop in found["hops"]
        if group != hop["text"] and overlap(box, tuple(hop["box"]))
    ]
    boxes = [
        (a["text"], b["text"])
        for a, b in itertools.combinations(found["hops"], 2)
        if overlap(tuple(a["box"]), tuple(b["box"]))
    ]
    return pairs + hops + boxes


def struck(found: Any) -> list[tuple[str, str]]:
    """Texts that the line of another seam runs through, or that their own does."""
    return [
        (line["group"], text["text"])
        for line in found["lines"]
        for text in found["texts"]
        if text["group"] and any(inside(point, text["box"]) for point in line["points"])
    ]


def inside(point: list[float], box: list[float]) -> bool:
    return box[0] + 1 < point[0] < box[2] - 1 and box[1] + 2 < point[1] < box[3] - 2


def check(found: Any) -> None:
    assert found["texts"]
    assert found["hops"]
    assert collisions(found) == []
    for text in found["texts"]:
        left, top, right, bottom = text["box"]
        assert left >= 0, text
        assert top >= 0, text
        assert right <= max(found["width"], found["whole"][0]), text
        assert bottom <= found["whole"][1], text
        assert text["size"] >= SMALLEST, text
    hops = {hop["text"]: hop["box"] for hop in found["hops"]}
    for text in found["texts"]:
        if text["group"] in hops:  # a hop's own text lies inside it
            box = hops[text["group"]]
            assert box[0] <= text["box"][0], text
            assert text["box"][2] <= box[2], text


def contrast(one: str, two: str) -> float:
    """Of two CSS colours, from 1 to 21 (WCAG 2.2, relative luminance)."""

    def luminance(colour: str) -> float:
        values = [int(n) / 255 for n in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


RINGS = {
    "quickstart": {},
    "reward before the buffer": {
        "hops.buffer.in": {"trajectory": "reward", "taken": "batch", "dropped": "batch"},
        "hops.reward.in": {
            "tokens": "rollout",
            "response_mask": "rollout",
            "leaf_offsets": "rollout",
            "ground_truth": "dispatch",
            "uid": "dispatch",
        },
        "hops.dispatch.in.finished": "reward",
    },
    "two versions late, with a queue": {"hops.dispatch.in.version.max_lag": 2},
    "over a budget": {"budgets.driver": "1 KB/step"},
}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_reads_at_1100_px(page: Page, name: str, dark: bool, tmp_path: Path) -> None:
    loaded = flowgraph.load(QUICKSTART, RINGS[name])
    assert {d.code for d in loaded.diagnostics} <= {"FG502"}, loaded.diagnostics
    page.scheme(dark)
    found = show(page, flowgraph.draw(loaded), tmp_path)
    check(found)
    assert found["whole"][0] <= WIDTH
    assert struck(found) == []
    for text in found["texts"]:
        assert contrast(text["colour"], found["back"]) >= 4.5, text
    assert page.console == []


@pytest.mark.parametrize(("fills", "text"), [(LIGHT, TEXT_LIGHT), (DARK, TEXT_DARK)], ids=["light", "dark"])
def test_a_name_stands_out_from_its_owners_hue(fills: tuple[str, ...], text: str) -> None:
    assert len(set(fills)) == len(fills)
    for fill in fills:
        assert (
            contrast(*(f"rgb({', '.join(str(b) for b in bytes.fromhex(c[1:]))})" for c in (fill, text)))
            >= 4.5
        )


def tree(n: int) -> Plan:
    return plans.plan(
        [
            plans.seam(f"n{(i - 1) // 2}", f"n{i}", plans.field(f"n{(i - 1) // 2}", f"p{i}", 10**i, 10**12))
            for i in range(1, n)
        ],
        owners=["driver", "rollout", "trainer"],
    )


def lattice() -> Plan:
    pairs = ["ab", "ac", "bd", "cd", "ad", "de", "ae", "xy", "be", "ce"]
    return plans.plan([plans.seam(a, b, plans.field(a, f"p{b}", 1000, 2000)) for a, b in pairs])


def chain(n: int, name: str = "hop{}") -> Plan:
    names = [name.format(i) for i in range(n)]
    seams = [plans.seam(a, b, plans.field(a, f"p{a}")) for a, b in itertools.pairwise(names)]
    return plans.plan(seams, owners=["driver", "rollout"])


OTHERS = {
    "a chain": chain(12),
    "a tree": tree(15),
    "a wide tree": plans.plan(
        [plans.seam("root", f"leaf{i}", plans.field("root", f"p{i}")) for i in range(20)]
    ),
    "a lattice with long edges": lattice(),
    "long names": chain(4, "a_hop_whose_name_is_much_too_long_to_stand_in_a_box_{}"),
    "two parts": plans.plan([plans.seam(a, b, plans.field(a, f"p{a}")) for a, b in ("ab", "cd", "ce")]),
    **{f"at random {seed}": random_plan(9, 2, seed % 2 == 0, 5, 4, 2, 8, seed) for seed in range(6)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_graph_reads_too(page: Page, name: str, tmp_path: Path) -> None:
    page.scheme(False)
    check(show(page, draw(OTHERS[name]), tmp_path))
    assert page.console == []


def test_a_hop_and_a_seam_say_in_a_tooltip_what_there_was_no_room_for(page: Page, tmp_path: Path) -> None:
    show(page, flowgraph.draw(QUICKSTART), tmp_path)
    said = page.evaluate("""JSON.stringify(Object.fromEntries(
        [...document.querySelectorAll('[data-hop],[data-seam]')].map((e) =>
            [e.dataset.hop ?? e.dataset.seam, e.querySelector('title').textContent])))""")
    tips = json.loads(said)
    assert "hops/reward.py" in tips["reward"]
    assert "tokens: i32[token] Below(vocab) from rollout.tokens, as uint16" in tips["batch→reward"]
    assert "encode: " in tips["batch→reward"]


def test_the_check_finds_what_overlaps(page: Page, tmp_path: Path) -> None:
    svg = draw(chain(3))
    moved = svg.replace('data-hop="hop1"', 'data-hop="hop1" transform="translate(-120 0)"')
    assert moved != svg
    assert collisions(show(page, moved, tmp_path))
    small = svg.replace("font-size: 10px", "font-size: 6px")
    with pytest.raises(AssertionError):
        check(show(page, small, tmp_path))
