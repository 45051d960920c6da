"""What is drawn is legible: nothing overlaps, whatever the graph; and the text is what the plan says."""

from __future__ import annotations

import cProfile
import itertools
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph.plan.compile import compile_file
from flowgraph.plan.plan import Plan
from flowgraph.report.audit import Measured, audit
from flowgraph.report.draw import FORMATS, draw
from flowgraph.report.draw.cells import place
from flowgraph.report.draw.flow import flow_of, main_path
from flowgraph.report.draw.layout import layout
from flowgraph.report.draw.shapes import Label, Picture
from flowgraph.report.draw.text import fit, text_width, wrap
from tests.unit import plans

GRAPH = str(Path(__file__).parents[2] / "graphs" / "quickstart.yaml")
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</text><script>alert("1")</script> & \x00\x1b \'x\' ]]> -->|"| `*_\n---\nsubgraph end'


@pytest.fixture(scope="module")
def quickstart() -> Plan:
    return compile_file(GRAPH)


def measured(plan: Plan, factor: float) -> Measured:
    read = {f"{s.reader}.{f.port}": int(f.mean_bytes * 30 * factor) for s in plan.seams for f in s.fields}
    return Measured(30, read, {}, 1000)


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ET.fromstring(svg).iter(f"{SVG}text")]


def boxes(picture: Picture) -> list[tuple[str, float, float, float, float]]:
    out = [(n.text.name, n.x, n.y, n.x + n.w, n.y + n.h) for n in picture.nodes]
    for edge in picture.edges:
        for label in edge.labels:
            text = label.lines[0][0].text
            out.append((text, label.x, label.y, label.x + label.w, label.y + label.h))
    return out


def overlaps(picture: Picture) -> list[tuple[str, str]]:
    return [
        (a[0], b[0])
        for a, b in itertools.combinations(boxes(picture), 2)
        if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]
    ]


def crossings(picture: Picture) -> list[tuple[str, str]]:
    """Lines that run through a label or a hop."""
    found = []
    for edge in picture.edges:
        for (x1, y1), (x2, y2) in itertools.pairwise(edge.points):
            left, right, top, bottom = min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)
            for name, bx1, by1, bx2, by2 in boxes(picture):
                if left < bx2 and bx1 < right + 0.1 and top < by2 and by1 < bottom + 0.1:
                    touches = (
                        left >= bx2 - 0.1 or right <= bx1 + 0.1 or top >= by2 - 0.1 or bottom <= by1 + 0.1
                    )
                    if not touches:
                        found.append((edge.text.shape, name))
    return found


def random_plan(
    n: int, prefix: int, ring: bool, extra: int, control: int, off: int, names: int, seed: int
) -> Plan:
    """A chain or ring of n hops with seams of payload that skip forward, control that runs back, and hops beside it."""
    rng = random.Random(seed)
    hops = [f"h{i}" + "x" * rng.randint(0, names) for i in range(n)]
    seams = {}
    for i, (a, b) in enumerate(itertools.pairwise(hops)):
        fields = [
            plans.field(a, f"p{i}_{k}", 10 ** rng.randint(0, 10), 10**11) for k in range(rng.randint(0, 3))
        ]
        seams[a, b] = plans.seam(a, b, *fields, control=[] if fields else ["rows"])
    if ring and prefix < n - 1:
        seams[hops[-1], hops[prefix]] = plans.seam(
            hops[-1], hops[prefix], control=["_version"], delay=1, max_lag=2
        )
    for k in range(extra):
        i, j = sorted(rng.sample(range(n), 2))
        field = plans.field(hops[0], f"e{k}", 5000, type="f32[layer, token, 2*expert+1]")
        seams.setdefault((hops[i], hops[j]), plans.seam(hops[i], hops[j], field))
    for k in range(control):
        i, j = sorted(rng.sample(range(n), 2))
        seams.setdefault((hops[j], hops[i]), plans.seam(hops[j], hops[i], control=[f"_event{k}"]))
    for k in range(off):
        at = rng.choice(hops)
        seams[at, f"off{k}"] = plans.seam(at, f"off{k}", control=["_value"])
    return plans.plan(seams.values(), hops, owners=["driver", "rollout", "trainer"], folds=hops[::3])


@settings(deadline=None, max_examples=150)
@given(
    st.builds(
        random_plan,
        n=st.integers(2, 30),
        prefix=st.integers(0, 5),
        ring=st.booleans(),
        extra=st.integers(0, 8),
        control=st.integers(0, 8),
        off=st.integers(0, 4),
        names=st.sampled_from([0, 8, 40]),
        seed=st.integers(0, 10**6),
    )
)
def test_nothing_overlaps_in_any_chain_or_ring(plan: Plan) -> None:
    picture = layout(plan, audit(plan, measured(plan, 1.5)))
    assert overlaps(picture) == []
    for name, x1, y1, x2, y2 in boxes(picture):
        assert 0 <= x1 < x2 <= picture.width, name
        assert -1 <= y1 < y2 <= picture.height + 1, name
    assert {n.text.name for n in picture.nodes} == set(plan.hops)
    assert len(picture.edges) == len(plan.seams)


@pytest.mark.parametrize("run", [None, 1.0, 0.7])
def test_the_quickstart_overlaps_nowhere_and_no_line_crosses_a_text(
    quickstart: Plan, run: float | None
) -> None:
    picture = layout(quickstart, audit(quickstart, measured(quickstart, run) if run else None))
    assert overlaps(picture) == []
    assert crossings(picture) == []
    assert picture.width <= 1100


def test_the_quickstart_is_a_folded_ring_closed_on_the_left(quickstart: Plan) -> None:
    prefix, loop = main_path(flow_of(quickstart))
    assert prefix == ["dataset"]
    assert loop == ["dispatch", "rollout", "buffer", "batch", "reward", "advantage", "train", "sync"]
    cells, _ = place(quickstart, flow_of(quickstart), 5)
    assert [cells[n] for n in (*prefix, *loop[:4])] == [(0, c) for c in range(5)]
    assert [cells[n] for n in loop[4:]] == [(1, c) for c in (4, 3, 2, 1)]
    assert cells["sync"][1] == cells["dispatch"][1]


def test_a_ring_of_odd_length_still_closes_vertically() -> None:
    names = [f"h{i}" for i in range(7)]
    seams = [plans.seam(a, b, plans.field(a, f"p{a}")) for a, b in itertools.pairwise(names)]
    seams.append(plans.seam("h6", "h2", control=["_v"], delay=1, max_lag=0))
    plan = plans.plan(seams)
    cells, _ = place(plan, flow_of(plan), 5)
    assert cells["h6"] == (1, cells["h2"][1])


def test_the_same_plan_gives_the_same_bytes(quickstart: Plan) -> None:
    for format in FORMATS:
        assert draw(quickstart, format=format) == draw(compile_file(GRAPH), format=format)


def test_the_svg_is_xml_without_scripts_or_links(quickstart: Plan) -> None:
    root = ET.fromstring(draw(quickstart))
    assert root.tag == f"{SVG}svg"
    assert not [
        e for e in root.iter() if e.tag in (f"{SVG}script", f"{SVG}image", f"{SVG}a", f"{SVG}foreignObject")
    ]


def test_hostile_names_and_docs_are_text_only() -> None:
    seams = [
        plans.seam(HOSTILE, "b", plans.field(HOSTILE, type=HOSTILE)),
        plans.seam("b", "c", control=[HOSTILE]),
    ]
    plan = plans.plan(seams, graph=HOSTILE, doc=HOSTILE * 3)
    root = ET.fromstring(draw(plan))
    assert not list(root.iter(f"{SVG}script"))
    assert any("<script>" in (e.text or "") for e in root.iter(f"{SVG}title"))
    text = draw(plan, format="mermaid")
    body = text.split("\n---\n", 1)[1]
    assert "<script>" not in body
    assert body.count('"') % 2 == 0
    assert not [line for line in body.splitlines() if line.strip().startswith("subgraph")]


def test_labels_say_shape_bytes_and_lifetime(quickstart: Plan) -> None:
    said = texts(draw(quickstart))
    for wanted in (
        "269 MB/step",
        "until consumed",
        "until version",
        "delay 1, max_lag 0",
        "f32[token]",
        "64 trajectories/step",
    ):
        assert wanted in said
    assert any(t.startswith("group=8 sample=8 prompt≤") for t in said)


def test_only_the_dominating_seam_is_red(quickstart: Plan) -> None:
    edges = layout(quickstart, audit(quickstart)).edges
    assert [e.text.price for e in edges if e.text.hot] == ["269 MB/step"]
    by = {(s.source, s.reader): e.text.line for s, e in zip(quickstart.seams, edges, strict=True)}
    assert by["batch", "train"] == "dashed"
    assert by["train", "sync"] == "solid"
    assert by["sync", "dispatch"] == "dotted"


def test_measured_bytes_stand_beside_predicted_ones(quickstart: Plan) -> None:
    exact, off = (draw(quickstart, audit(quickstart, measured(quickstart, f))) for f in (1.0, 0.5))
    assert "269 MBmeasured" in texts(exact)
    assert "135 MBmeasured" in texts(off)
    assert "measured differs from predicted" in off
    assert "measured differs from predicted" not in exact


def test_a_seam_without_a_price_says_so() -> None:
    plan = plans.plan([plans.seam("a", "b", plans.field("a", mean=0, most=0, type="tensors", priced=False))])
    assert "unpriced" in draw(plan)
    assert "unpriced" in draw(plan, format="mermaid")


@pytest.mark.parametrize("names", [[], ["alone"]])
def test_graphs_without_seams_are_drawn(names: list[str]) -> None:
    plan = plans.plan([], names)
    ET.fromstring(draw(plan))
    assert draw(plan, format="mermaid").startswith("---\n")


def test_a_cycle_without_a_delay_is_drawn() -> None:
    plan = plans.plan([plans.seam(a, b, plans.field(a, f"p{a}")) for a, b in ("ab", "bc", "ca", "aa")])
    assert overlaps(layout(plan, audit(plan))) == []


def test_an_unknown_format_is_refused(quickstart: Plan) -> None:
    with pytest.raises(ValueError, match="svg, mermaid"):
        draw(quickstart, format="png")  # type: ignore[arg-type]


def test_mermaid_names_every_hop_and_seam_once(quickstart: Plan) -> None:
    lines = draw(quickstart, format="mermaid").splitlines()
    assert sum(1 for line in lines if "-->|" in line or "-.->|" in line) == len(quickstart.seams)
    assert sum(1 for line in lines if ":::" in line) == len(quickstart.hops)


def test_texts_are_cut_to_their_room() -> None:
    assert fit("abc", 10, "sans", 100) == "abc"
    cut = fit("a long name of a hop", 10, "bold", 60)
    assert cut.endswith("…")
    assert text_width(cut, 10, "bold") <= 60
    assert text_width("漢字", 10) > text_width("ab", 10)
    lines = wrap("one two three four five six seven", 10, 60, 2)
    assert len(lines) == 2
    assert all(text_width(line, 10) <= 60 for line in lines)


def test_labels_are_no_wider_than_their_boxes(quickstart: Plan) -> None:
    labels: list[Label] = [label for e in layout(quickstart, audit(quickstart)).edges for label in e.labels]
    assert labels
    for label in labels:
        for line in label.lines:
            assert sum(span.width for span in line) <= label.w + 0.01


def test_one_hop_with_a_thousand_readers_is_laid_out_in_time_that_grows_with_them() -> None:
    """By counting calls, not seconds: what a label tries grows with the readers, not with their square."""

    def calls(readers: int) -> int:
        seams = [plans.seam("a", f"b{i}", plans.field("a", f"p{i}")) for i in range(readers)]
        seams += [plans.seam(f"b{i}", "z", plans.field(f"b{i}", f"q{i}")) for i in range(readers)]
        plan = plans.plan(seams)
        profile = cProfile.Profile()
        profile.runcall(draw, plan)
        return sum(entry.callcount for entry in profile.getstats())

    small, large = calls(100), calls(400)
    assert large < 6 * small
