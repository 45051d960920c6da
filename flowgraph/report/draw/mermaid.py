"""Mermaid text that GitHub renders: the same labels as the SVG, for a README or a pull request."""

from __future__ import annotations

import json

from flowgraph.plan.plan import Plan
from flowgraph.report.audit.rows import Audit
from flowgraph.report.draw.colours import LIGHT, TEXT_LIGHT, owner_classes
from flowgraph.report.draw.labels import EdgeText, NodeText, edge_text, is_forward, node_text
from flowgraph.report.draw.layout import stroke_width
from flowgraph.report.draw.text import clean

CLASSES = tuple(
    f"classDef o{i} fill:{colour},stroke:#818b98,color:{TEXT_LIGHT}" for i, colour in enumerate(LIGHT)
)
CONFIG = ("config:", "  flowchart:", "    rankSpacing: 20", "    nodeSpacing: 30")
# What would end a quoted label, open a tag or start an entity.
ENTITIES = {char: f"#{ord(char)};" for char in '#&<>"`\\*_'}


def to_mermaid(plan: Plan, audit: Audit) -> str:
    rows = {(r.source, r.reader): r for r in audit.seams}
    ids = {name: f"n{i}" for i, name in enumerate(plan.hops)}
    title = clean(plan.graph + (f": {plan.doc}" if plan.doc else ""))
    lines = ["---", f"title: {json.dumps(title, ensure_ascii=False)}", *CONFIG, "---", "flowchart LR"]
    colours = owner_classes(plan)
    for name, hop in plan.hops.items():
        lines.append(f"  {ids[name]}{_node(node_text(plan, hop), colours[hop.owner])}")
    used = set(colours.values())
    styles = []
    drawn = [s for s in plan.seams if s.source in ids and s.reader in ids]
    for i, seam in enumerate(drawn):
        text = edge_text(plan, seam, rows[seam.source, seam.reader])
        arrow = {"solid": "-->", "dashed": "-->", "dotted": "-.->"}[text.line]
        lines.append(
            f'  {ids[seam.source]} {arrow}|"{_label(text, is_forward(plan, seam))}"| {ids[seam.reader]}'
        )
        style = [f"stroke-width:{stroke_width(text):g}px"] if text.line != "dotted" else []
        style += ["stroke-dasharray:7 4"] if text.line == "dashed" else []
        style += ["stroke:#cf222e"] if text.hot else []
        styles += [f"  linkStyle {i} {','.join(style)}"] if style else []
    return "\n".join([*lines, *(f"  {c}" for c in CLASSES if c.split()[1] in used), *styles]) + "\n"


def _node(text: NodeText, colour: str) -> str:
    lines = [f"<b>{_escape(text.name)}</b>", *(_escape(line) for line in text.lines)]
    return f'["{"<br/>".join(lines)}"]:::{colour}'


def _label(text: EdgeText, forward: bool) -> str:
    """A control seam that carries no work on says only what it is called."""
    shape = _escape(text.shape) + (f" {_escape(text.more)}" if text.more else "")
    if text.line == "dotted" and not forward:
        return shape + (f"<br/><b>{_escape(text.back)}</b>" if text.back else "")
    before = f"{_escape(text.before)} → " if text.before else ""
    lines = [shape, f"{before}<b>{_escape(text.price)}</b>"]
    lines += [f"<b>{_escape(text.measured)}</b> measured"] if text.measured else []
    lines.append(_escape(f"{text.how}, {text.until}"))
    end = f"over {text.over}" if text.over else text.by
    return "<br/>".join([*lines, *([_escape(end)] if end else [])])


def _escape(text: str) -> str:
    return "".join(ENTITIES.get(c, c) for c in clean(text))
