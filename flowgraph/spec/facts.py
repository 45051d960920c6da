"""Where a promise about content finds what it speaks of: the bounds of its rows, and what is valid in them."""

from __future__ import annotations

from flowgraph.spec.dims import integer, symbol
from flowgraph.spec.hop import HopSpec
from flowgraph.spec.ports import HopTypeError, Port
from flowgraph.spec.types import LastToken, Mask, Shared, TiledOver


def companions(spec: HopSpec, port: Port, fact: LastToken | TiledOver | Shared) -> tuple[str, str]:
    """The hop's ports (bounds, mask) that a fact of `port` takes; mask is "" where every token is valid.

    They are of the rows that the port is of: what a fold reads is of other rows than those that it makes.
    Raises HopTypeError when there is none, or more than one and the fact names none.
    """
    inputs = spec.inputs if spec.facts.kind != "fold" else ()
    ports = {p.name: p for p in (*inputs, *spec.columns)}
    edges = symbol(fact.dim) + integer(1)
    bounds = [n for n, p in ports.items() if p.kind == "array" and p.shape == (edges,) and "int" in p.dtype]
    name = _one(spec, port, fact, "bounds", f"i64[{fact.dim}+1]", fact.bounds, bounds)
    if isinstance(fact, Shared):
        return name, ""
    masks = [
        n for n, p in ports.items() if p.shape == port.shape[:1] and any(isinstance(f, Mask) for f in p.facts)
    ]
    return name, _one(spec, port, fact, "mask", "Mask", fact.mask, masks) if masks or fact.mask else ""


def _one(
    spec: HopSpec,
    port: Port,
    fact: LastToken | TiledOver | Shared,
    what: str,
    form: str,
    said: str,
    found: list[str],
) -> str:
    who = f"{type(fact).__name__} of port {port.name} of {spec.use}"
    if said and said not in found:
        raise HopTypeError(
            f"{who} names {what} {said}, which is no {form} here", f"name one of {', '.join(found) or 'none'}"
        )
    if not said and not found:
        raise HopTypeError(f"{who} has no {what}", f"give the hop a port of type {form}")
    if not said and len(found) > 1:
        raise HopTypeError(
            f"{who} may mean {' or '.join(found)}",
            f'write {type(fact).__name__}("{fact.dim}", {what}="{found[0]}")',
        )
    return said or found[0]
