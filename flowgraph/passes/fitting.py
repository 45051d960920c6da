"""Which output fits an input by its type alone."""

from __future__ import annotations

from flowgraph.ir.graph import Graph, Node
from flowgraph.spec.ports import INTEGER, Port


def same_type(source: Port, port: Port) -> bool:
    """Equal kinds and dtypes. A plain value may be of a narrower type; one that is sampled must be kept.

    Who reads integers as they lie takes any.
    """
    if port.kind == "value" and source.kind == "value":
        fits = not source.dtype or port.dtype in ("", source.dtype, *source.wider)
        return fits and not (port.mode == "latest" and source.mode == "event")
    if port.dtype == INTEGER:
        return source.kind == "array" and "int" in source.dtype
    return (source.kind, source.dtype) == (port.kind, port.dtype)


def sole_giver(graph: Graph, node: Node, port: Port) -> str | None:
    """The only hop whose output a plain value or a level of rows can be read from: `sync`, or `buffer.free`."""
    others = [n for n in graph.nodes.values() if n is not node]
    fits = [(n.name, p.name) for n in others for p in n.spec.outputs if _can_be(p, port)]
    names = [hop if output in ("out", port.name) else f"{hop}.{output}" for hop, output in fits]
    return names[0] if len(names) == 1 else None


def _can_be(output: Port, port: Port) -> bool:
    if port.kind == "rows":
        # Rows that are queued go through hops that each add to them; a level has one that keeps it.
        level = output.mode == port.mode == "latest"
        return level and (output.kind, output.row_kind) == (port.kind, port.row_kind)
    typed = port.dtype != "" and output.dtype != ""
    return typed and output.kind == port.kind == "value" and same_type(output, port)
