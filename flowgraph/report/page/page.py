"""page: one HTML file that needs no other: pictures and tables for every state of the toggles, made here once.

The script only shows, hides and sorts what stands in the file, so that what is seen is what the audit says.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files

from flowgraph.plan.plan import Plan
from flowgraph.report.audit import Audit
from flowgraph.report.census import Census, State, census
from flowgraph.report.draw.labels import dims_text
from flowgraph.report.draw.svg import STYLE, to_svg
from flowgraph.report.draw.text import clean, escape
from flowgraph.report.page import hops
from flowgraph.report.page.tables import census_table, owner_table, seam_table
from flowgraph.report.page.views import View, views
from flowgraph.spec.units import per_step, size_text

# Nothing is fetched from anywhere, and nothing is run but what stands in the file.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
CHOICES = {"plan": ("naive", "compiled"), "bytes": ("predicted", "measured")}
WHY = {
    "naive": "naive is known of a graph, and not of a plan alone",
    "measured": "measured: give --run DIR of a run",
}
COMPILED = "<small>of the compiled plan</small>"
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def page(
    plan: Plan, priced: Audit, naive: Plan | None = None, busy: Mapping[str, float] | None = None
) -> str:
    """priced: the audit of the plan, with its run if there is one; naive: the plan that `plan.naive` makes.

    busy: owner → the share of its run's time that it was busy
    The same arguments give the same bytes.
    """
    shown = views(plan, priced, naive)
    states = census(plan)
    title = clean(plan.graph)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}: data flow</title>",
        f"<style>{STYLE}{_file('page.css')}</style></head><body>",
        f"<header><h1>{escape(title)}</h1><p>{escape(clean(plan.doc))}</p>{_toggles(shown)}</header><main>",
        *(f'<p class="note">{escape(clean(note))}</p>' for note in priced.notes),
        *(_view(view) for view in shown),
        f'<p class="dims">{escape(clean(dims_text(plan.dims)))}</p>',
        f"<h2>Owners {COMPILED}</h2>",
        owner_table(plan, priced, busy or {}),
        f"<h2>State {COMPILED}</h2>",
        *_census(states),
        "</main>",
        '<aside id="panel" hidden aria-label="Hop"><button type="button" id="close">Close</button>',
        *(_hop(plan, name, states) for name in plan.hops),
        "</aside>",
        f"<script>{_file('page.js')}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _file(name: str) -> str:
    return files("flowgraph.report.page").joinpath(name).read_text(encoding="utf-8")


def _toggles(shown: list[View]) -> str:
    there = {"plan": {v.plan_as for v in shown}, "bytes": {v.bytes_as for v in shown}}
    reasons = [WHY[name] for group, names in CHOICES.items() for name in names if name not in there[group]]
    out = []
    for group, names in CHOICES.items():
        out.append(f'<fieldset><legend class="hidden">{group}</legend>')
        for name in names:
            off = "" if name in there[group] else ' disabled aria-describedby="why"'
            on = " checked" if name in ("compiled", "predicted") else ""
            out.append(f'<label><input type="radio" name="{group}" value="{name}"{on}{off}>{name}</label>')
        out.append("</fieldset>")
    known = escape(json.dumps([v.key for v in shown]))
    why = f'<p id="why">{escape("; ".join(reasons))}</p>'
    return f'<form id="toggles" data-views="{known}">{"".join(out)}{why}</form>'


def _view(view: View) -> str:
    hidden = "" if view.key == "compiled-predicted" else " hidden"
    driver = "through the controller" if view.plan_as == "naive" else "through the driver"
    before = (view.audit.before, view.audit.driver_before) if view.plan_as == "compiled" else (None, None)
    totals = [
        _total("total", view.total, "read over all seams", before[0]),
        _total("driver", view.driver, driver, before[1]),
    ]
    return "".join(
        [
            f'<section data-view="{view.key}"{hidden}><p class="totals">{"".join(totals)}</p>',
            f'<p class="said">{escape(view.said)}</p>',
            f'<div class="picture" tabindex="-1">{to_svg(view.plan, view.audit, style=False)}</div>',
            "<h2>Seams</h2>",
            seam_table(view),
            "</section>",
        ]
    )


def _total(css: str, nbytes: float | None, what: str, before: float | None) -> str:
    shown = "unknown" if nbytes is None else per_step(nbytes)
    was = "" if before is None else f" <small>as written {per_step(before)}</small>"
    return f'<span><b class="{css}">{shown}</b> {what}{was}</span>'


def _hop(plan: Plan, name: str, states: Census) -> str:
    hop = plan.hops[name]
    found = [*hops.facts(plan, hop), *(("state", _state(s)) for s in states.states if s.hop == name)]
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(clean(v))}</dd>" for k, v in found)
    return (
        f'<section data-about="{escape(name)}" hidden><h2>{escape(clean(name))}</h2>'
        f'<pre class="signature">{_verbatim(hops.signature(plan, hop))}</pre>'
        f'<div class="docstring">{_paragraphs(hop.doc)}</div><dl>{rows}</dl></section>'
    )


def _state(state: State) -> str:
    size = size_text(state.nbytes) + ("" if state.exact else " and more")
    return f"{state.name}: {size}; restored by: {state.restored}"


def _verbatim(text: str) -> str:
    """A text with its lines and blanks as they are."""
    return html.escape(NO_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def _paragraphs(text: str) -> str:
    """Lines are joined as the browser likes; those of a block with indented ones stay as they are."""
    blocks = [block.strip("\n") for block in text.split("\n\n") if block.strip()]
    return "".join(map(_paragraph, blocks)) or "<p>no docstring</p>"


def _paragraph(block: str) -> str:
    css = ' class="lines"' if re.search(r"(?m)^\s", block) else ""
    return f"<p{css}>{_verbatim(block)}</p>"


def _census(found: Census) -> Iterator[str]:
    yield (
        f"<p>{len(found.states)} states, {size_text(found.nbytes)}{'' if found.exact else ' and more'}; "
        f"complexity {found.complexity}: each boundary that a state crosses is one thing to keep right.</p>"
    )
    yield census_table(found)
