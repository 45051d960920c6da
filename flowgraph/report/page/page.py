"""page: one HTML file that needs no other: pictures and tables for every state of the toggles, made here once.

The script only shows, hides and sorts what stands in the file, so that what is seen is what the audit says.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from importlib.resources import files

from flowgraph.plan.plan import Plan
from flowgraph.report.audit import Audit
from flowgraph.report.census import census
from flowgraph.report.draw.labels import dims_text
from flowgraph.report.draw.svg import STYLE, to_svg
from flowgraph.report.draw.text import clean, escape
from flowgraph.report.page import hops
from flowgraph.report.page.tables import census_table, seam_table
from flowgraph.report.page.views import View, views
from flowgraph.spec.units import per_step, size_text

# Nothing is fetched from anywhere, and nothing is run but what stands in the file.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
CHOICES = {"plan": ("naive", "compiled"), "bytes": ("predicted", "measured")}
WHY = {
    "naive": "known of a graph, and not of a plan alone",
    "measured": "give --run DIR for what a run measured",
}


def page(plan: Plan, priced: Audit, naive: Plan | None = None) -> str:
    """priced: the audit of the plan, with its run if there is one; naive: the plan that `plan.naive` makes.

    The same arguments give the same bytes.
    """
    shown = views(plan, priced, naive)
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
        "<h2>State</h2>",
        *_census(plan),
        "</main>",
        '<aside id="panel" hidden aria-label="Hop"><button type="button" id="close">Close</button>',
        *(_hop(plan, name) for name in plan.hops),
        "</aside>",
        f"<script>{_file('page.js')}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _file(name: str) -> str:
    return files("flowgraph.report.page").joinpath(name).read_text(encoding="utf-8")


def _toggles(shown: list[View]) -> str:
    there = {"plan": {v.plan_as for v in shown}, "bytes": {v.bytes_as for v in shown}}
    out = []
    for group, names in CHOICES.items():
        out.append(f'<fieldset><legend class="hidden">{group}</legend>')
        for name in names:
            off = "" if name in there[group] else f' disabled title="{WHY[name]}"'
            on = " checked" if name in ("compiled", "predicted") else ""
            out.append(f'<label><input type="radio" name="{group}" value="{name}"{on}{off}>{name}</label>')
        out.append("</fieldset>")
    return (
        f'<form id="toggles" data-views="{escape(json.dumps([v.key for v in shown]))}">{"".join(out)}</form>'
    )


def _view(view: View) -> str:
    hidden = "" if view.key == "compiled-predicted" else " hidden"
    driver = "through the controller" if view.plan_as == "naive" else "through the driver"
    totals = [
        f'<b class="total">{per_step(view.total)}</b> read over all seams',
        f'<b class="driver">{per_step(view.driver)}</b> {driver}',
    ]
    if view.audit.before is not None and view.audit.driver_before is not None and view.plan_as == "compiled":
        totals.append(
            f"without any pass {size_text(view.audit.before)} and {size_text(view.audit.driver_before)}"
        )
    return "".join(
        [
            f'<section data-view="{view.key}"{hidden}><p class="totals">{"; ".join(totals)}</p>',
            f'<p class="said">{escape(view.said)}</p>',
            f'<div class="picture" tabindex="-1">{to_svg(view.plan, view.audit, style=False)}</div>',
            "<h2>Seams</h2>",
            seam_table(view),
            "</section>",
        ]
    )


def _hop(plan: Plan, name: str) -> str:
    hop = plan.hops[name]
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(clean(v))}</dd>" for k, v in hops.facts(plan, hop))
    return (
        f'<section data-about="{escape(name)}" hidden><h2>{escape(clean(name))}</h2>'
        f'<pre class="signature">{_verbatim(hops.signature(plan, hop))}</pre>'
        f'<div class="docstring">{_paragraphs(hop.doc)}</div><dl>{rows}</dl></section>'
    )


def _verbatim(text: str) -> str:
    """A text with its lines and blanks as they are."""
    return html.escape(text.replace("\0", "\N{REPLACEMENT CHARACTER}"))


def _paragraphs(text: str) -> str:
    blocks = [_verbatim(block.strip("\n")) for block in text.split("\n\n") if block.strip()]
    return "".join(f"<p>{block}</p>" for block in blocks) or "<p>no docstring</p>"


def _census(plan: Plan) -> Iterator[str]:
    found = census(plan)
    yield (
        f"<p>{len(found.states)} states, {size_text(found.nbytes)}{'' if found.exact else ' and more'}; "
        f"complexity {found.complexity}: each boundary that a state crosses is one thing to keep right.</p>"
    )
    yield census_table(found)
