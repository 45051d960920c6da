"""DOT text for Graphviz and its viewers: the same labels as the SVG, laid out by whoever reads it."""

from __future__ import annotations

from flowgraph.plan.plan import Plan
from flowgraph.report.audit.rows import Audit
from flowgraph.report.draw.colours import LIGHT, owner_classes
from flowgraph.report.draw.labels import EdgeText, NodeText, edge_text, node_text
from flowgraph.report.draw.layout import stroke_width
from flowgraph.report.draw.text import clean, escape

HEAD = (
    "  rankdir=LR",
    '  node [shape=box, style="rounded,filled", color="#818b98", fontname="Helvetica", fontsize=10]',
    '  edge [color="#59636e", fontname="Helvetica", fontsize=9]',
)


def to_dot(plan: Plan, audit: Audit) -> str:
    rows = {(r.source, r.reader): r for r in audit.seams}
    colours = owner_classes(plan)
    lines = [f"digraph {_quoted(plan.graph)} {{", *HEAD, f"  label={_quoted(plan.doc)}"]
    for name, hop in plan.hops.items():
        fill = LIGHT[int(colours[hop.owner][1:])]
        said = node_text(plan, hop)
        about = f'fillcolor="{fill}", tooltip={_quoted(said.tooltip)}'
        lines.append(f"  {_quoted(name)} [label=<{_node(said)}>, {about}]")
    for seam in plan.seams:
        if seam.source in plan.hops and seam.reader in plan.hops:
            text = edge_text(plan, seam, rows[seam.source, seam.reader])
            lines.append(f"  {_quoted(seam.source)} -> {_quoted(seam.reader)} [{_edge(text, seam.delay)}]")
    return "\n".join([*lines, "}"]) + "\n"


def _node(text: NodeText) -> str:
    return "<BR/>".join([f"<B>{escape(clean(text.name))}</B>", *(escape(clean(one)) for one in text.lines)])


def _edge(text: EdgeText, delay: int) -> str:
    lines = [" ".join(word for word in (text.shape, text.more) if word)]
    lines.append(f"{text.before} → {text.price}" if text.before else text.price)
    lines += [f"{text.measured} measured"] if text.measured else []
    lines.append(f"{text.how}, {text.until}")
    lines += [f"over {text.over}"] if text.over else [text.by] if text.by else []
    label = "<BR/>".join(
        f"<B>{escape(clean(t))}</B>" if i == 1 else escape(clean(t)) for i, t in enumerate(lines)
    )
    parts = [f"label=<{label}>", f"tooltip={_quoted(text.tooltip)}", f"penwidth={stroke_width(text):g}"]
    parts += [f"style={text.line}"] if text.line != "solid" else []
    parts += ['color="#cf222e", fontcolor="#cf222e"'] if text.hot else []
    parts += ["constraint=false"] if delay else []  # a back edge does not decide who stands before whom
    return ", ".join(parts)


def _quoted(text: str) -> str:
    """A DOT string on one line; what would end or escape it is escaped."""
    lines = [clean(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'
