"""Mermaid text that GitHub renders: the same labels as the SVG, for a README or a pull request."""

from __future__ import annotations

import json

from flowgraph.plan.plan import Plan
from flowgraph.report.audit.rows import Audit
from flowgraph.report.draw.labels import EdgeText, NodeText, edge_text, is_forward, node_text
from flowgraph.report.draw.layout import stroke_width
from flowgraph.report.draw.text import clean

CLASSES = (
    "classDef cpu fill:#dbe9f6,stroke:#818b98,color:#1f2328",
    "classDef resource fill:#ffe0ba,stroke:#818b98,color:#1f2328",
    "classDef ledger fill:#e6e8eb,stroke:#818b98,color:#1f2328",
)
CONFIG = ("config:", "  flowchart:", "    rankSpacing: 20", "    nodeSpacing: 30")
# What would end a quoted label, open a tag or start an entity.
ENTITIES = {char: f"#{ord(char)};" for char in '#&<>"`\\*_'}


def to_mermaid(plan: Plan, audit: Audit) -> str:
    rows = {(r.source, r.reader): r for r in audit.seams}
    ids = {name: f"n{i}" for i, name in enumerate(plan.hops)}
    title = clean(plan.graph + (f": {plan.doc}" if plan.doc else ""))
    lines = ["---", f"title: {json.dumps(title, ensure_ascii=False)}", *CONFIG, "---", "flowchart LR"]
    for name, hop in plan.hops.items():
        lines.append(f"  {ids[name]}{_node(node_text(plan, hop))}")
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
    return "\n".join([*lines, *(f"  {c}" for c in CLASSES), *styles]) + "\n"


def _node(text: NodeText) -> str:
    lines = [f"<b>{_escape(text.name)}</b>", *(_escape(line) for line in text.lines)]
    return f'["{"<br/>".join(lines)}"]:::{text.colour}'


def _label(text: EdgeText, forward: bool) -> str:
    """A control seam that carries no work on says only what it is called."""
    shape = _escape(text.shape) + (f" {_escape(text.more)}" if text.more else "")
    if text.line == "dotted" and not forward:
        return shape + (f"<br/><b>{_escape(text.back)}</b>" if text.back else "")
    lines = [shape, f"<b>{_escape(text.price)}</b>"]
    lines += [f"<b>{_escape(text.measured)}</b> measured"] if text.measured else []
    return "<br/>".join([*lines, _escape(f"{text.how}, {text.until}")])


def _escape(text: str) -> str:
    return "".join(ENTITIES.get(c, c) for c in clean(text))
