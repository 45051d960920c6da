"""Facts: what a promise about content needs of the hop that makes it, so that a pass can use it and a run check it.

All of it stands in the signature, so it is checked when that is read, once for every hop that uses the function.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowgraph.spec import types as T
from flowgraph.spec.dims import integer, parse
from flowgraph.spec.ports import HopTypeError, Port

if TYPE_CHECKING:
    from flowgraph.spec.hop import HopSpec


class FactError(HopTypeError):
    """A fact that nothing can be made of."""

    code = "FG206"


def companions(spec: HopSpec, port: Port, fact: T.LastToken | T.TiledOver | T.Shared) -> tuple[str, str]:
    """The ports of a hop that a fact speaks of: bounds of the rows, and what is valid ("" when every token is).

    They are sought among the ports of the same side first: an output has its own bounds where the hop gives any. What a
    fold reads is of other rows than those that it makes. A value of several dims is valid or not along its first.
    Raises FactError naming what is missing or ambiguous.
    """
    who = f"{type(fact).__name__}({fact.dim!r}) of port {port.name} of {spec.use}"
    try:
        bounds_shape = (parse(fact.dim) + integer(1),)
    except ValueError as error:
        raise FactError(f"{who}: {error}", 'name the dim of the rows, e.g. "leaf"') from None
    read = spec.inputs if spec.facts.kind != "fold" else ()
    sides = (spec.inputs, spec.columns) if port in spec.inputs else (spec.columns, read)
    where = [[p for p in side if p != port and not p.optional and p.kind == "array"] for side in sides]
    fits = [[p for p in side if p.shape == bounds_shape and p.dtype in T.INTEGERS] for side in where]
    wanted = f"an integer port of shape {fact.dim}+1"
    bounds = _one(who, "bounds", fact.bounds, fits, wanted)
    if not bounds:
        known = {str(p.shape[0]).removesuffix("+1"): p.name for side in where for p in side if _is_bounds(p)}
        help = f'take or give one, such as {fact.dim}_offsets: Int64[Array, "{fact.dim}+1"]'
        if known:
            help = f"name {' or '.join(known)}, whose bounds are {' or '.join(known.values())}; or {help}"
        raise FactError(f"{who} needs {wanted}, and there is none", help)
    if isinstance(fact, T.Shared):
        return bounds, ""
    masks = [[p for p in side if p.shape == port.shape[:1] and T.Mask() in p.facts] for side in where]
    return bounds, _one(who, "mask", fact.mask, masks, f"a Mask port of shape {port.shape[0]}")


def _is_bounds(port: Port) -> bool:
    return port.dtype in T.INTEGERS and len(port.shape) == 1 and str(port.shape[0]).endswith("+1")


def _one(who: str, what: str, named: str, sides: Sequence[Sequence[Port]], wanted: str) -> str:
    """The port that is named, else the only one of the first side that has any; "" when none has."""
    known = [p.name for side in sides for p in side]
    if named:
        if named not in known:
            help = f"name {wanted}: {', '.join(dict.fromkeys(known)) or 'there is none'}"
            raise FactError(f"{who} names {named} as its {what}, which is not {wanted}", help)
        return named
    names = next(([p.name for p in side] for side in sides if side), [])
    if len(names) > 1:
        message = f"{who} may mean any of {', '.join(names)} as its {what}"
        raise FactError(message, f'say which: {what}="{names[0]}"')
    return names[0] if names else ""


def check_facts(spec: HopSpec) -> None:
    """Every fact of a hop can be found, used and checked. Raises FactError."""
    for port in (*spec.inputs, *spec.columns):
        for fact in port.facts:
            who = f"{type(fact).__name__} of port {port.name} of {spec.use}"
            if port.kind != "array":
                raise FactError(f"{who} is said of {port}", "say it of an array")
            match fact:
                case T.LastToken() | T.TiledOver() | T.Shared():
                    if not port.shape:
                        message = f"{who} is said of a single value, which has no rows"
                        raise FactError(message, "say it of an array with a dim")
                    companions(spec, port, fact)
                case T.Mask():
                    if port.dtype != "bool":
                        raise FactError(f"{who} is said of {port}", "make it a Bool array")
                case T.Below(bound=bound):
                    _below(who, port, bound)
                case T.Derivable():
                    _derivable(who, spec, port, fact)


def _below(who: str, port: Port, bound: str) -> None:
    if port.dtype not in T.INTEGERS:
        raise FactError(f"{who} is said of {port}", "say it of an array of integers")
    try:
        parse(bound)
    except ValueError as error:
        raise FactError(f"{who}: {error}", 'write a dim expression such as "vocab"') from None


def _derivable(who: str, spec: HopSpec, port: Port, fact: T.Derivable) -> None:
    by = fact.by
    module, name = getattr(by, "__module__", ""), getattr(by, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not by:
        raise FactError(f"{who}: {name or by!r} can't be imported", "name a function at the top of a module")
    others = {p.name: p for p in spec.columns if p != port}
    if port not in spec.columns or not fact.sources or not set(fact.sources) <= set(others):
        strange = [s for s in fact.sources if s not in others]
        message = f"{who} is derived from {', '.join(strange) or 'nothing'}"
        help = f"name other outputs of the hop: {', '.join(others) or 'there are none'}"
        raise FactError(message if port in spec.columns else f"{who} is said of an input", help)
    twice = [s for s in fact.sources if any(isinstance(f, T.Derivable) for f in others[s].facts)]
    if twice:
        raise FactError(f"{who} is derived from {twice[0]}, which is derived itself", "name what is written")
